"""`summary` in Gluon, for Hopper: one warp brings tiles ahead of the warpgroups that hold H, or M, or going back c.

Tiles are handed over as in `scan`: `full` when the copy engine has written a stage, `free` when every part has read it,
which a part says under the next chunk's first product. A direction is a file.
"""

from wyfold.kernels.summary.gluon.backward import summary_bwd, wyfold_summary_bwd_gluon
from wyfold.kernels.summary.gluon.forward import summary, wyfold_summary_gluon

__all__ = ["summary", "summary_bwd", "wyfold_summary_bwd_gluon", "wyfold_summary_gluon"]
