"""Causal convolution over time, one short filter per channel, in one launch, forward and backward.

    p[t] = bias + sum_{i < W} weight[:, i] x[t - W + 1 + i]        y[t] = act(p[t]) + residual[t]

Inputs before a sequence's first token come from its state, or are zero. The final state holds the latest S inputs.
Backward, with dp = dy act'(p):

    dx[t] = sum_{i < W} weight[:, i] dp[t + W - 1 - i]
    dweight[:, i] = sum_t dp[t] x[t - W + 1 + i]        dbias = sum_t dp[t]

x before the first token is the state, so dstate is the same sum. All tokens of a batch lie in one row, sequence after
sequence. A token's bits depend only on the W - 1 inputs before it in its sequence.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ConvGradients(NamedTuple):
    """Buffers that `conv_bwd` writes; None where a gradient is not wanted.

    Attributes:
        x: [T, D].
        weight, bias: [W, D] and [D], sums over tokens. In the wide dtype if they are added up here, as on eager.
        state: [N, D, S], wide.
    """

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    state: Tensor | None
