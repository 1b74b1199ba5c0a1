"""Maps of segments: the scan without output.

The products are those of the Triton kernel, in the same order and with the same roundings:

    R^T = V^T - (S^T k^T) in           V is zero where M is made
    S^T <- total S^T + (R^T beta) E                         folded
    S^T <- total S^T + ((R^T W^T) beta out) k               else; beta out comes from `prepare`

A summarised segment ends at a border, so all its chunks are full.

Each chunk multiplies M by the decay, which may underflow it to zeros; then it stays zeros. Under a scalar gate programs
share a multiprocessor. There, programs of M check for zeros now and then and stop early. No bit changes, and the
programs of H get the multiprocessor to themselves.
"""

from wyfold.kernels.segment_summary.gluon.forward.kernel import wyfold_segment_summary_gluon
from wyfold.kernels.segment_summary.gluon.forward.launch import segment_summary

__all__ = ["segment_summary", "wyfold_segment_summary_gluon"]
