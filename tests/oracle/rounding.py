"""Bounds on rounding errors from measured propagation.

Derivation: docs/numerics.md, "The bound of the outside oracle". A loop marks every rounded intermediate, including
the products of sums, by a slot. `Perturb` disturbs each slot independently, forward and backward, by a relative `STEP`,
in float64. The root mean square of a result's change, divided by STEP, is its response: the propagated size of
independent unit local errors. A sum of n terms in unit roundoff u has a local error of at most LAMBDA n u times the
root of the sum of squares of its terms, so LAMBDA n u times the response bounds a result's error in the Frobenius norm.
"""

import math
from typing import Any

import torch
from torch import Tensor

STEP = 2.0**-26
"""Relative disturbance of a slot: small enough for first order, large compared with float64's own rounding."""

LAMBDA = 4.0
"""Higham and Mary's confidence parameter: a sum of n terms exceeds the bound with probability 2 n exp(-8) at most."""

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


class _Perturb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mass: Tensor, back: Tensor | None, noise: "Noise") -> Tensor:
        ctx.noise, ctx.back = noise, back
        return torch.addcmul(x, noise.like(x), mass, value=STEP)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        mass = grad.abs() if ctx.back is None else grad.abs() + ctx.back
        return torch.addcmul(grad, ctx.noise.like(grad), mass, value=STEP), None, None, None


class Noise:
    """Standard normal numbers, drawn in blocks because most slots take few."""

    BLOCK = 1 << 14

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.block, self.used = torch.empty(0, dtype=torch.float64), 0

    def like(self, x: Tensor) -> Tensor:
        count = x.numel()
        if self.used + count > self.block.numel():
            self.block = torch.randn(max(count, self.BLOCK), dtype=torch.float64, generator=self.generator)
            self.used = 0
        self.used += count
        return self.block[self.used - count : self.used].view(x.shape)


class Perturb:
    """A slot that disturbs its argument.

    Args:
        seed: Seed of the disturbances.
        work: Dtype of the operator's arithmetic.
        gate_mass: Mass of the gradient of log gates, see `log_gates`.
    """

    probing = True

    def __init__(self, seed: int, work: torch.dtype, gate_mass: Tensor | None = None) -> None:
        self.work = work
        self.noise = Noise(seed)
        self.gate_mass = gate_mass

    def __call__(self, x: Tensor, mass: Tensor | None = None) -> Tensor:
        mass = x.detach().abs() if mass is None else mass
        if not x.requires_grad:
            return torch.addcmul(x, self.noise.like(x), mass, value=STEP)
        return _Perturb.apply(x, mass, None, self.noise)

    def log_gates(self, g: Tensor) -> Tensor:
        """Log gates [B, T, ...] that may be summed from a chunk's first token, where the prefix sums are rounded."""
        return _Perturb.apply(g, window_sum(self.added(g)), self.gate_mass, self.noise)

    def exponent_mass(self, own: Tensor, gates: Tensor) -> Tensor:
        """Mass of the exponent between two rows of a gram.

        In float32, where gates are summed in float64, it is the mass of the gates between. In float64 it is the mass of
        all gates, since the exponent is the difference of two sums that start at the chunk's first row.
        """
        return self.added(gates).sum(2) if self.work == torch.float64 else own

    def added(self, g: Tensor) -> Tensor:
        """Magnitudes of log gates as they are added: a reset counts as the floor of its dtype (docs/numerics.md)."""
        return g.detach().abs().clamp(max=746.0 if self.work == torch.float64 else 104.0)


def window_sum(x: Tensor, chunk: int = 64) -> Tensor:
    """Sum over each token and the chunk - 1 tokens before it."""
    total = x.cumsum(1)
    return total - torch.nn.functional.pad(total, (0, 0) * (x.ndim - 2) + (chunk, 0))[:, : x.shape[1]]


def gate_mass(seen: dict[str, Tensor]) -> Tensor | None:
    """Mass of the gradient of log gates where it is the reversed sum of q dq - k dk over a chunk's tokens.

    Further rows and columns of other rules, named a0, b0, .., are summed in the same way.
    """
    g = seen.get("g")
    if g is None or g.grad is None:
        return None
    squares = torch.zeros((), dtype=g.dtype)
    for name, x in seen.items():
        if name not in ("g", "beta") and x.grad is not None:
            terms = (x.detach() * x.grad) ** 2
            terms = terms if g.ndim == 4 else terms.sum(-1)
            squares = squares + terms.repeat_interleave(g.shape[2] // x.shape[2], 2)
    if squares.ndim == 0:
        return None
    return window_sum(squares.flip(1)).flip(1).clamp(min=0.0).sqrt()


def storage_error(x: Tensor, dtype: torch.dtype) -> float:
    """Bound on the Frobenius norm of the error of rounding x once to dtype."""
    smallest = torch.finfo(dtype).smallest_normal
    ulp = UNIT[dtype] * x.abs().clamp(min=smallest)
    return torch.linalg.vector_norm(ulp).item()


def response(clean: dict[str, Tensor], disturbed: list[dict[str, Tensor]]) -> dict[str, float]:
    """Root mean square of each result's change, per unit of local error."""
    sizes: dict[str, float] = {}
    for name, x in clean.items():
        if not x.is_floating_point():
            continue
        squares = [torch.linalg.vector_norm(other[name] - x).item() ** 2 for other in disturbed]
        sizes[name] = math.sqrt(sum(squares) / len(squares)) / STEP
    return sizes


def bound(x: Tensor, response: float, terms: int, work: torch.dtype, stored: torch.dtype) -> float:
    """Bound on the Frobenius norm of a result's error: the arithmetic's, the loop's own, and that of storing it."""
    arithmetic = LAMBDA * terms * (UNIT[work] + UNIT[torch.float64]) * response
    return arithmetic + storage_error(x, stored) * (1 + UNIT[stored])
