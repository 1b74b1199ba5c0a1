"""`prepare` in Gluon for Hopper: no gate or a scalar gate, bfloat16, chunks of 64, unfolded.

One program computes a chunk of one value head: full or partial, packed or not, loaded by TMA or by pointer. Its results
have the accuracy of the Triton launch, with the same bfloat16 pairs, but not its bits. The differences: the loads of k
and q are both issued before any wait, products are no larger than needed, and five programs fit a multiprocessor
(docs/facts/hopper.md, SASS-6).

All tiles are [s, r], upper triangular, and (I + U)^-1 is computed as in `tile.inverse.gluon`: each of the four warps
holds 16 rows. The result is W = (I + J diag(beta))^-1, not A = diag(beta) W / beta. So the weights of pairs have beta
in their rows, for U as for P, and the forward's factor needs no further scaling:

    F diag(beta) = (P diag(beta)) W

F is that divided by beta, which is held away from zero throughout, so that W has the same bits in both directions. The
forward's factor is exactly zero where beta is.

Rows past the last token may hold anything. Results with such an r or s are masked, like those with r before s.
"""

from wyfold.kernels.prepare.gluon.scalar.kernel import wyfold_prepare_gluon
from wyfold.kernels.prepare.gluon.scalar.launch import prepare

__all__ = ["prepare", "wyfold_prepare_gluon"]
