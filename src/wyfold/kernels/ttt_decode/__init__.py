"""TTT-Linear decoding: one token of each sequence, with states in the slots of a pool.

    n = inner gradient at z = S^T k + c, times the token's factor
    G <- G + k n^T          a <- a + n          h = s (S - e G)^T q + c - e a          o = h + w LN(h) + u

After the last token of a mini-batch, S <- S - e G and c <- c - e a, and G, a and the position are reset to zero.

Source: Learning to (learn at test time), arXiv:2407.04620, the primal form of a mini-batch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pools(NamedTuple):
    """Inner models and positions of all sequences, updated in place; any strides.

    Attributes:
        S: [slots, HV, K, V] state entering the open mini-batch.
        c: [slots, HV, 1, V] bias entering the open mini-batch.
        G: [slots, HV, K, V] sum of k n^T over its tokens so far.
        a: [slots, HV, 1, V] sum of n over its tokens so far.
        position: [slots] int32 or int64, number of tokens in the open mini-batch.
    """

    S: Tensor
    c: Tensor
    G: Tensor
    a: Tensor
    position: Tensor
