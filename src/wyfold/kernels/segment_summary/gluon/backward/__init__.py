"""Gradients at the segments' borders: the reverse half of `scan_bwd` without X.

The products are those of the Triton kernel, in the same order and with the same roundings:

    X^T = s do^T F + dS^T E^T                              folded
    X^T = s do^T F + ((dS^T k^T) out beta) W / beta        else
    dS^T <- total dS^T + s (do^T in) q - (beta X^T in) k

Products with s do not depend on dS. do^T F keeps the matrix units busy while the first product's result is rounded for
the second, and do^T q while X is rounded for the last. A partial chunk comes first; its rows past the last token are
cleared in shared memory.
"""

from wyfold.kernels.segment_summary.gluon.backward.kernel import wyfold_segment_summary_bwd_gluon
from wyfold.kernels.segment_summary.gluon.backward.launch import segment_summary_bwd

__all__ = ["segment_summary_bwd", "wyfold_segment_summary_bwd_gluon"]
