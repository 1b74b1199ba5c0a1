"""`segment_summary` in Gluon, for Hopper: a producer warp loads tiles for the consumer warpgroups, which hold H, M
or c.

Tiles are handed over as in `scan`: `full` when the copy engine has written a stage, `free` when every part has read it,
which a part says under the next chunk's first product. A direction is a file.
"""

from wyfold.kernels.segment_summary.gluon.backward import segment_summary_bwd, wyfold_segment_summary_bwd_gluon
from wyfold.kernels.segment_summary.gluon.forward import segment_summary, wyfold_segment_summary_gluon

__all__ = ["segment_summary", "segment_summary_bwd", "wyfold_segment_summary_bwd_gluon", "wyfold_segment_summary_gluon"]
