"""TTT-Linear, one token of each sequence, whose state lies in the slots of a pool: one step inside a mini-batch.

    n = inner gradient at z = S^T k + c, times the token's factor
    G <- G + k n^T          a <- a + n          h = s (S - e G)^T q + c - e a          o = h + w LN(h) + u

and with the last token of a mini-batch S <- S - e G, c <- c - e a, and G, a and the position start again from zero.

Source: Learning to (learn at test time), arXiv:2407.04620, the primal form of a mini-batch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pools(NamedTuple):
    """Where the sequences stand, updated in place; any strides.

    Attributes:
        S, G: [slots, HV, K, V] state of the open mini-batch, and the sum of k n^T so far.
        c, a: [slots, HV, 1, V] its bias, and the sum of n.
        position: [slots] int32 or int64, tokens of the open mini-batch.
    """

    S: Tensor
    c: Tensor
    G: Tensor
    a: Tensor
    position: Tensor
