"""`segment_summary` in Gluon, for Hopper: a producer warp loads tiles for the consumer warpgroups, which hold H, M or
c.

Stages are handed over as in `scan`. `full`: TMA has written a stage. `free`: every part has read it; a part arrives
under the first product of the next chunk. Each direction has its own file.
"""

from wyfold.kernels.segment_summary.gluon.backward import segment_summary_bwd, wyfold_segment_summary_bwd_gluon
from wyfold.kernels.segment_summary.gluon.forward import segment_summary, wyfold_segment_summary_gluon

__all__ = ["segment_summary", "segment_summary_bwd", "wyfold_segment_summary_bwd_gluon", "wyfold_segment_summary_gluon"]
