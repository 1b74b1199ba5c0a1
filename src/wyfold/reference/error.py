"""The rule of acceptance: the only source of tolerances.

A result is compared with the truth: the token loops of this package in float64, and their autograd. A yardstick in the
result's dtype (the eager backend; `rounded` for 16-bit kernels) shows the error that this dtype implies. With

    rms(x)     = |x - truth| / |truth|
    largest(x) = max |x - truth|
    row(x)     = max over rows of |error row| / max(|truth row|, a tenth of the mean truth row)
    floor      = rms(truth rounded to the dtype of the result)

a result passes if all of these hold:

    1. rms(result)     <= 1.25 rms(yardstick) + floor / 4
    2. largest(result) <= 2 largest(yardstick) + 2 ulp(max |truth|)
    3. row(result)     <= 2 row(yardstick) + 2 floor
    4. rms(result)     <= the absolute target, since yardstick and result may share a mistake
    5. the result is finite where the truth is, and zero if the truth is zero throughout
    6. if half an ulp on the inputs moves the truth by more than 5 %, only rule 5 applies: the problem is ill-posed

Rules 1 to 3 need a yardstick, rule 4 a target. Giving neither is an error, because such a judgement could not fail.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# A row of per-token scalars (beta, a scalar gate, their gradients) is this many tokens of one head.
TOKENS_PER_ROW = 64
# A number below this fraction of its natural scale counts as an exact zero.
ZERO = 2.0**-110
ILL_POSED = 0.05


@dataclass(frozen=True)
class Errors:
    """The three error measures of one tensor, or their limits (infinite where no rule sets one).

    Attributes:
        rms: Relative error of the whole tensor.
        largest: Absolute error of the worst element.
        row: Relative error of the worst row.
    """

    rms: float
    largest: float
    row: float


@dataclass(frozen=True)
class Verdict:
    """Result of `judge` for one tensor.

    Attributes:
        name: Name of the tensor.
        dtype: Dtype of the result.
        measured: Measured errors.
        limits: Limits of the errors.
        reason: Why it failed; empty if it passed.
        waived: Rule 6 applied: the errors were measured but not judged.
    """

    name: str
    dtype: torch.dtype
    measured: Errors
    limits: Errors
    reason: str
    waived: bool = False

    @property
    def passed(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        pairs = zip(("rms", "largest", "row"), astuple(self.measured), astuple(self.limits))
        shown = "  ".join(f"{label} {got:8.2e} <= {limit:8.2e}" for label, got, limit in pairs)
        outcome = self.reason or ("waived" if self.waived else "ok")
        return f"{self.name:<12} {str(self.dtype).removeprefix('torch.'):<9} {shown}  {outcome}"


def rms(x: Tensor, truth: Tensor) -> float:
    """Relative error of a whole tensor, `|x - truth| / |truth|`; 0 or infinity for a zero truth."""
    return _ratio(_length(_error(x, truth)), _length(truth.double()))


def largest(x: Tensor, truth: Tensor) -> float:
    """Absolute error of the worst element."""
    return _largest(_error(x, truth))


def row(x: Tensor, truth: Tensor, *, per_token: bool = False) -> float:
    """Relative error of the worst row; a row's length counts as at least a tenth of the mean length.

    Args:
        x: [..., D]; with `per_token` [B, T, HV].
        truth: Shape of x.
        per_token: A row is 64 tokens of one head instead of the last axis.
    """
    if truth.numel() == 0:
        return 0.0
    errors = torch.linalg.vector_norm(_rows(_error(x, truth), per_token), dim=-1)
    lengths = torch.linalg.vector_norm(_rows(truth.double(), per_token), dim=-1)
    lengths = lengths.clamp(min=lengths.mean().item() / 10)
    return torch.where(errors == 0, 0.0, errors / lengths).max().item()


def floor(truth: Tensor, dtype: torch.dtype) -> float:
    """Error of the truth rounded to `dtype`."""
    return rms(truth.to(dtype), truth)


def ulp(size: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of `dtype` at the given size."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(max(size, info.tiny)))


def half_ulp_away(x: Tensor, seed: int = 0) -> Tensor:
    """x in float64, with every element moved up or down by half an ulp of x's dtype.

    Args:
        x: Any shape, float32 or narrower. Zeros and infinities are unchanged.
        seed: Seed of the random directions.
    """
    wide = x.double()
    steps = torch.finfo(x.dtype).eps * torch.exp2(torch.frexp(wide).exponent.double() - 1)
    up = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device) * 2 - 1
    return torch.where((wide != 0) & wide.isfinite(), wide + up * steps / 2, wide)


def judge(
    got: Tensor,
    truth: Tensor,
    yardstick: Tensor | Sequence[Tensor] | None = None,
    *,
    name: str,
    target: float | None = None,
    per_token: bool = False,
    moved: Tensor | None = None,
    natural_scale: float = 1.0,
) -> Verdict:
    """Judge one tensor by the rules at the top of this file.

    Args:
        got: The result, any shape and float dtype; its dtype sets the floor and the ulp.
        truth: Shape of got, float64.
        yardstick: Shape of got: result of the eager backend, or of `rounded`, for the same inputs in the same dtype. Of
            several, the largest error counts in each measure.
        name: Name of the tensor, for the table.
        target: Absolute bound on the rms error, from `target`.
        per_token: got holds per-token scalars, [B, T, HV].
        moved: The truth for inputs moved by `half_ulp_away`; enables rule 6.
        natural_scale: Size of the terms that the tensor sums. Values below 2^-110 of it count as zero.

    Raises:
        ValueError: Shapes differ, truth is not float64, or there is neither yardstick nor target.
    """
    if truth.dtype != torch.float64:
        raise ValueError(f"judge: truth must be float64, got {truth.dtype}")
    yardsticks = () if yardstick is None else (yardstick,) if isinstance(yardstick, Tensor) else tuple(yardstick)
    for label, x in (("got", got), *(("yardstick", x) for x in yardsticks), ("moved", moved)):
        if x is not None and x.shape != truth.shape:
            raise ValueError(f"judge: {label} must be {list(truth.shape)}, got {list(x.shape)}")
    if not yardsticks and target is None:
        raise ValueError(f"judge: {name} needs a yardstick or a target, got neither")

    got, truth = got.detach(), truth.detach()
    # Elements whose truth is not finite, or not in the dtype's range, are not judged.
    defined = truth.to(got.dtype).isfinite()
    if not got[defined].isfinite().all():
        return Verdict(name, got.dtype, Errors(math.inf, math.inf, math.inf), _NONE, "not finite where the truth is")
    truth = truth.where(defined, 0)
    measured = _measure(got.where(defined, 0), truth, per_token)
    if _largest(truth) <= ZERO * natural_scale:
        zero = _largest(got.where(defined, 0)) <= ZERO * natural_scale
        return Verdict(name, got.dtype, measured, _NONE, "" if zero else "not zero where the truth is")
    if moved is not None and rms(moved.detach().where(defined, 0), truth) > ILL_POSED:
        return Verdict(name, got.dtype, measured, _NONE, "", waived=True)

    limits = _NONE
    if yardsticks:
        seen = [_measure(x.detach().where(defined, 0), truth, per_token) for x in yardsticks]
        allowed = Errors(*map(max, *map(astuple, seen))) if len(seen) > 1 else seen[0]
        lost = floor(truth, got.dtype)
        limits = Errors(
            1.25 * allowed.rms + lost / 4,
            2 * allowed.largest + 2 * ulp(_largest(truth), got.dtype),
            2 * allowed.row + 2 * lost,
        )
    if target is not None:
        limits = Errors(min(limits.rms, target), limits.largest, limits.row)
    # `not <=` instead of `>`, so that a NaN limit fails.
    over = [
        label
        for label, value, limit in zip(("rms", "largest", "row"), astuple(measured), astuple(limits))
        if not value <= limit
    ]
    return Verdict(name, got.dtype, measured, limits, ", ".join(over) and f"over in {', '.join(over)}")


def require(*verdicts: Verdict) -> None:
    """Check that every verdict passed.

    Raises:
        AssertionError: A verdict failed; the message is the table of all verdicts.
    """
    if not all(verdict.passed for verdict in verdicts):
        raise AssertionError("further from the truth than allowed\n" + "\n".join(map(str, verdicts)))


_NONE = Errors(math.inf, math.inf, math.inf)


def _measure(x: Tensor, truth: Tensor, per_token: bool) -> Errors:
    return Errors(rms(x, truth), largest(x, truth), row(x, truth, per_token=per_token))


def _error(x: Tensor, truth: Tensor) -> Tensor:
    return x.detach().double() - truth.detach().double()


def _length(x: Tensor) -> float:
    return torch.linalg.vector_norm(x.detach()).item()


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _ratio(error: float, size: float) -> float:
    if error == 0:
        return 0.0
    return error / size if size else math.inf


def _rows(x: Tensor, per_token: bool) -> Tensor:
    """x as rows along its last axis."""
    x = x.detach()
    if not per_token:
        return x.reshape(-1, x.shape[-1] if x.ndim else 1)
    B, T, HV = x.shape
    padded = F.pad(x.transpose(1, 2), (0, -T % TOKENS_PER_ROW))
    return padded.reshape(B * HV * (padded.shape[-1] // TOKENS_PER_ROW), TOKENS_PER_ROW)
