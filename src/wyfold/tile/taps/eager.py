"""Depthwise filter of a few taps over tokens.

Products are added tap by tap, elementwise and in one order. `torch.nn.functional.conv1d` would choose its algorithm,
and with it the bits, by the shape of the whole call.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def taps(inputs: Tensor, w: Tensor) -> Tensor:
    """y[t] = sum_i w[i] inputs[t + i], last tap first.

    The adjoint in `inputs` is the same sum with the taps in reverse: `taps(dy padded by W - 1 zeros, w.flip(0))`.

    Args:
        inputs: [..., n + W - 1, D].
        w: [W, D].

    Returns:
        [..., n, D].
    """
    W = w.shape[0]
    n = inputs.shape[-2] - W + 1
    y = inputs.narrow(-2, W - 1, n) * w[W - 1]
    term = torch.empty_like(y)
    for i in reversed(range(W - 1)):
        torch.mul(inputs.narrow(-2, i, n), w[i], out=term)
        y += term
    return y


def tap_products(inputs: Tensor, dy: Tensor) -> Iterator[Tensor]:
    """For each tap i, yield the terms dy[t] inputs[t + i], whose sum over t is the gradient of w[i].

    All taps share one tensor like dy, refilled for every tap: the reader may overwrite it but must not keep it.

    Args:
        inputs: [..., n + W - 1, D].
        dy: [..., n, D].
    """
    n, terms = dy.shape[-2], torch.empty_like(dy)
    for i in range(inputs.shape[-2] - n + 1):
        yield torch.mul(inputs.narrow(-2, i, n), dy, out=terms)
