"""`chunk_scaled_dot_kkt` in float32 had errors up to 7e-5 after resets, because gates are summed from a chunk's start.

A reset counts as -104, so the prefix sum of a chunk of 64 reaches thousands, and the decay between two later rows had
the rounding error of that sum. Now the error of an entry depends only on the gates between its two rows.
"""

import pytest
import torch
from torch.nn import functional as F

import wyfold

NEGLIGIBLE = 2.0**-78
"""Threshold below which a decay times a key element may be flushed to zero."""

GATES = {
    "half of the tokens reset": lambda u: torch.where(u < 0.5, -torch.inf, -0.02 * (u - 0.5)),
    "strong ones": lambda u: -8 * u,
    "one in ten is -1e4": lambda u: torch.where(u < 0.1, -1e4, -0.01 * u),
    "from 1e-3 to 10": lambda u: -(10 ** (4 * u - 3)),
}


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("gates", GATES)
def test_error_is_within_the_bound(gates: str, channels: bool, chunk: int, backend: str, device: torch.device):
    T, K = chunk, 16
    k, beta = F.normalize(torch.randn(1, T, 1, K), dim=-1), torch.rand(1, T, 1)
    g = GATES[gates](torch.rand(1, T, 1, K) if channels else torch.rand(1, T, 1))
    L = wyfold.chunk_scaled_dot_kkt(*(x.to(device) for x in (k, beta, g)), chunk_size=chunk, backend=backend).cpu()
    expected, allowed = gram_and_bound(k, beta, g if channels else g[..., None])
    worst = ((L[0, :, 0].double() - expected).abs() / allowed.clamp(min=2.0**-149)).max().item()
    assert worst <= 1, f"{worst:.3g} times the bound"


def gram_and_bound(k: torch.Tensor, beta: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """L of one head in float64, and the bound on |error| from docs/numerics.md, "The gram of keys"."""
    T, K = k.shape[1], k.shape[3]
    k, beta, g = k[0, :, 0].double(), beta[0, :, 0].double(), g[0, :, 0].double()
    expected, allowed = torch.zeros(T, T, dtype=torch.float64), torch.zeros(T, T, dtype=torch.float64)
    for r in range(T):
        for s in range(r):
            between = g[s + 1 : r + 1].sum(0)
            terms = k[r] * k[s] * between.exp()
            exponent = between.abs().clamp(max=104 * (r - s)).nan_to_num(posinf=0.0)
            expected[r, s] = beta[r] * terms.sum()
            allowed[r, s] = beta[r] * (
                2.0**-24 * ((K + 8 + 2 * exponent) * terms.abs()).sum() + NEGLIGIBLE * k[r].abs().sum()
            )
    return expected, allowed
