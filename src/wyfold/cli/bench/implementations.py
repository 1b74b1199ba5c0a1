"""Implementations that `bench` runs, and the accuracy check of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import wyfold
from wyfold import serving
from wyfold.cli.bench.cases import Case, gradient_name, leaves
from wyfold.cli.bench.peer import Adapter, Peer
from wyfold.cli.catalog import OPS, OURS, VARIANTS
from wyfold.cli.operators import NARROW, PER_TOKEN, Arguments, Named, bound, widened
from wyfold.reference.error import Verdict, judge, rms

TOKENS = frozenset({"q", "r", "k", "v", "a", "b", "p", "w", "g", "gk", "beta", "eta", "x", "A", "o", "y"})
"""Tensors [B, T, ..]."""
PARAMETERS = {"ttt": ("w", "b")}
"""Operator, as `Case.kind` -> tensors with one of these names that are parameters [HV, ..] there."""
OF_UPDATES = frozenset({"k", "v", "beta"})
"""Tensors with `Case.updates` rows for each token."""

CHECKED = 200
"""On a CPU: tokens whose gradients are compared. The float64 recurrence keeps one state per token."""
CHECKED_FORWARD = 4096
"""On a CPU: longest sequence whose outputs are compared completely."""
CHECKED_PATH = 8192
"""On a GPU: tokens of PaTH attention that are compared. The time of its reference grows with their square."""
CHECKED_HEADS = 4
"""On a GPU: number of key heads that are compared, with their value heads; the first and the last are included."""
OUR_ERROR_FACTOR, PEER_ERROR_FACTOR = 2.0, 4.0
"""Multiple of its limit above which an error counts as wrong, and the implementation gets no time.

An implementation of Wyfold between one and two times its limit is timed, and the run fails.
"""
PRECISION = 1e-2
"""Relative error up to which a peer is accepted: its arithmetic may differ, such as TF32 for float32."""
WORST_ROW = 0.5
"""Relative error of a single row above which the row is wrong. Rounding alone gave at most 0.08."""


@dataclass(frozen=True)
class BenchImplementation:
    """An implementation of an operator that a case times.

    Attributes:
        name: "wyfold", or the peer's name on the command line.
        ran: Full name of the function, with the variant or flag it is called with.
        call: Maps the case's arguments, extended by `prepare`, to the output.
        prepare: Makes further arguments without gradient, once, outside the timed region.
        backward: Whether it is differentiable.
        tuned: As in `Adapter`.
    """

    name: str
    ran: str
    call: Callable[[Arguments], Tensor]
    prepare: Callable[[Arguments], Arguments] = lambda arguments: {}
    backward: bool = True
    tuned: bool = False

    def __call__(self, arguments: Arguments) -> Tensor:
        return self.call(arguments | self.prepare(arguments))


def implementations_of(case: Case, peers: Sequence[Peer], variants: Sequence[str] = ()) -> list[BenchImplementation]:
    """Wyfold, Wyfold with each of the flags `variants`, then every peer that has the operator."""
    operator = case.spec.name if case.layer else OPS[case.op]
    found = [_wyfold(case, "")]
    for flag in variants:
        # disable_recompute changes only what is saved for a backward.
        if case.op in VARIANTS[flag] and (case.backward or flag != "disable_recompute"):
            found.append(_wyfold(case, flag))
    for peer in peers:
        for adapter in peer.adapters.get(operator, ()):
            found.append(_peer(peer, adapter))
    return found


def _wyfold(case: Case, flag: str) -> BenchImplementation:
    flags: Arguments = {flag: True} if flag else {}
    if case.backend:
        flags["backend"] = case.backend
    if case.decoding:
        return BenchImplementation(
            OURS,
            "wyfold.serving.decode",
            lambda arguments: serving.decode(**case.decode_arguments(arguments | flags)),
            lambda arguments: {"pool": arguments["initial_state"].clone()},
            backward=False,
        )
    name = f"wyfold.{case.spec.operator}" + (f", {flag}" if flag else "")
    return BenchImplementation(OURS, name, lambda arguments: case.spec.ours(arguments | flags)[0])


def _peer(peer: Peer, adapter: Adapter) -> BenchImplementation:
    """A peer's implementation. If its library cannot be imported, calling it raises the import error."""
    name = f"{peer.name}, {adapter.variant}" if adapter.variant else peer.name
    try:
        loaded = adapter.load()
    except Exception as error:  # another library's import may raise anything; its row shows the error
        reason = error

        def refuse(arguments: Arguments) -> Tensor:
            raise reason

        return BenchImplementation(peer.name, f"{name} (not loaded)", refuse)
    ran = loaded.ran + (f", {adapter.variant}" if adapter.variant else "")
    return BenchImplementation(peer.name, ran, loaded.call, loaded.prepare, adapter.backward, adapter.tuned)


def make_call(
    implementation: BenchImplementation, case: Case, arguments: Arguments, fed: Tensor | None = None
) -> Callable[[], Tensor | tuple[Tensor, ...]]:
    """Make a function without arguments that runs a case once, for timing.

    Args:
        implementation: Implementation to run.
        case: Case to run.
        arguments: Arguments of the case.
        fed: Gradient of the output, for a backward; None draws the case's own.

    Returns:
        A function that returns the output, or the gradients of all floating arguments.
    """
    ready = arguments | implementation.prepare(arguments)
    if not case.backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return implementation.call(ready)

        return forward

    asked = leaves(arguments)
    ready |= asked
    gradient = case.incoming(arguments) if fed is None else fed

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(implementation.call(ready), list(asked.values()), gradient)

    return both


def plan(implementation: BenchImplementation, case: Case, arguments: Arguments) -> dict[str, Any]:
    """Wyfold's plan for these arguments, as fields of the row; empty for a peer."""
    if implementation.name != OURS or case.layer:
        return {}
    asked = {"backend": case.backend} if case.backend else {}
    if case.decoding:
        found = wyfold.explain(serving.decode, **case.decode_arguments(arguments | asked))
    else:
        found = wyfold.explain(getattr(wyfold, OPS[case.op]), **(arguments | asked))
    return {
        "backend": found.backend,
        "forward": found.forward,
        "backward": found.backward,
        "chunk": found.chunk_size,
        "copies": found.copies,
    }


# --- accuracy check --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of one call.

    Attributes:
        verdicts: One per tensor, against Wyfold's limits, the largest error first.
        correct: Whether the call may be timed; it may still exceed a limit.
        eager: Tensor -> relative error of the eager backend in the case's dtype, where it is the yardstick on a GPU.
        nonfinite: Names of tensors that have a NaN or infinity outside the compared part.
    """

    verdicts: tuple[Verdict, ...]
    correct: bool
    eager: dict[str, float] = field(default_factory=dict)
    nonfinite: tuple[str, ...] = ()

    @property
    def within_limits(self) -> bool:
        """Whether every tensor is within Wyfold's limits."""
        return self.correct and all(verdict.passed for verdict in self.verdicts)

    @property
    def row(self) -> dict[str, Any]:
        """Accuracy fields of a result row."""
        worst = self.verdicts[0]
        return {
            "errors": {
                v.name: {
                    "rms": v.measured.rms,
                    "limit": v.limits.rms,
                    "eager": self.eager.get(v.name),
                    "row": v.measured.row,
                    "reason": v.reason,
                }
                for v in self.verdicts
            },
            "worst_error": worst.measured.rms,
            "worst_tensor": worst.name,
            "not_finite_elsewhere": self.nonfinite,
            "correct": self.correct,
            "within_limits": self.within_limits,
            "failed": not self.within_limits,
        }


@dataclass
class AccuracyCheck:
    """Accuracy check of all implementations on one set of tensors. The reference is computed once per mode.

    On a CPU the reference is the float64 token loop. In 16 bits the loop in that dtype is the yardstick. Outputs are
    compared over the whole sequence up to `CHECKED_FORWARD` tokens. For gradients, the loss depends on the first
    `CHECKED` tokens only, so the loop can stop there; gradients of later tokens must be zero.

    On a GPU the reference is the eager backend in float64, which `wyfold verify` compares with the token loop. It runs
    over `heads` key heads and their value heads, because heads are independent, and all tokens (PaTH attention:
    `CHECKED_PATH`). All other elements must be finite. Operators with absolute targets are compared with those of their
    input dtype and with `WORST_ROW`. Others in 16 bits have the eager backend in that dtype as yardstick.

    Attributes:
        case: Case whose tensors are checked.
        arguments: Tensors of the case.
        heads: On a GPU, number of key heads to compare.
        everything: Compare all tokens, also on a CPU.
    """

    case: Case
    arguments: Arguments
    heads: int = CHECKED_HEADS
    everything: bool = False
    _references: dict[bool, tuple[Named, Named]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s = self.case.shape
        self.narrow = getattr(torch, self.case.dtype) in NARROW
        most = CHECKED if not self.case.on_gpu else CHECKED_PATH if self.case.kind == "path" else s.T
        self.tokens = s.T if self.everything else min(s.T, most)
        self.output_tokens = self.tokens if self.case.on_gpu or self.narrow or s.T > CHECKED_FORWARD else s.T
        self.per_head = "k" in self.arguments or "A" in self.arguments
        some = min(self.heads, s.H)
        self.checked_heads = sorted({round(i * (s.H - 1) / max(1, some - 1)) for i in range(some)})

    @property
    def method(self) -> str:
        """Description of the comparison, for the result row."""
        if not self.case.on_gpu:
            return (
                f"token loop in float64; outputs of {self.output_tokens} tokens, gradients of a loss on {self.tokens}"
            )
        if not self.per_head:
            return "eager in float64; everything"
        tokens = "all" if self.tokens == self.case.shape.T else f"the first {self.tokens}"
        heads = f"key heads {self.checked_heads} of {self.case.shape.H}"
        return f"eager in float64; {tokens} tokens of {heads} and their value heads"

    def check_call(self, implementation: BenchImplementation, backward: bool, *, ours: bool) -> Accuracy:
        """Check the call that will be timed."""
        with torch.no_grad():
            o = implementation(self.arguments)
        return self.check_tensors(
            o, gradients_of(implementation, self.arguments, self.fed()) if backward else {}, ours=ours
        )

    def check_tensors(self, o: Tensor, gradients: Named, *, ours: bool) -> Accuracy:
        """Check an output, and the gradients for the output gradient `fed()`, if given."""
        got, finite = self._compared(o, gradients)
        truth, yardstick = self._reference(bool(gradients))
        verdicts = [self._verdict(name, x, truth[name], yardstick.get(name)) for name, x in got.items()]
        verdicts.sort(key=lambda verdict: verdict.measured.rms, reverse=True)
        right = all(accurate_enough(verdict, ours=ours) for verdict in verdicts)
        eager = {name: rms(x, truth[name]) for name, x in yardstick.items()} if self.case.on_gpu else {}
        nonfinite = tuple(name for name, fine in finite.items() if not fine)
        return Accuracy(tuple(verdicts), right and not nonfinite, eager, nonfinite)

    def _verdict(self, name: str, got: Tensor, truth: Tensor, yardstick: Tensor | None) -> Verdict:
        if name == "deta":  # [B, T, HV, 1]: one number per token, not a row of channels
            got, truth = got.squeeze(-1), truth.squeeze(-1)
            yardstick = None if yardstick is None else yardstick.squeeze(-1)
        family, per_token = self.case.family, PER_TOKEN.get(name) == got.ndim
        target = bound(name, got.dtype, family)
        if self.case.on_gpu and self.case.targeted:
            target, yardstick = bound(name, getattr(torch, self.case.dtype), family), None
        elif self.case.layer and self.narrow:
            target = None  # a sum over all tokens of what was rounded to 16 bits, whatever the parameter's dtype
        elif got.dtype not in NARROW:
            yardstick = None
        if target is None and yardstick is None:
            target = bound(name, torch.float32)
        found = judge(got, truth, yardstick, name=name, target=target, per_token=per_token)
        if found.passed and found.measured.row > WORST_ROW:
            limits = replace(found.limits, row=WORST_ROW)
            return replace(found, limits=limits, reason=f"over in row: {found.measured.row:.1e}")
        return found

    def _compared(self, o: Tensor, gradients: Named) -> tuple[Named, dict[str, bool]]:
        """The compared part of each tensor, and whether each complete tensor is finite."""
        name = self.case.spec.outputs[0]
        got = {name: self._compared_part(name, o, self.output_tokens)}
        got |= {of: self._compared_part(of, x, self.tokens, exact=True) for of, x in gradients.items()}
        if not self.case.on_gpu:
            return got, {}
        return got, {of: bool(x.isfinite().all()) for of, x in ({name: o} | gradients).items()}

    def _reference(self, backward: bool) -> tuple[Named, Named]:
        """Reference tensors, and in 16 bits the yardstick, if anything is compared with it."""
        if backward not in self._references:
            name, measured = self.case.spec.outputs[0], self.narrow and not (self.case.on_gpu and self.case.targeted)
            if backward:
                (truth, loop), few = self._reference(False), self._arguments(self.tokens)
                fed = self._compared_part(name, self.fed(), self.tokens)
                truth = truth | gradients_of(self._reference_output, _in_float64(few), fed.double())
                loop = loop | gradients_of(self._reference_output, few, fed) if measured else {}
            else:
                few = self._arguments(self.output_tokens)
                with torch.no_grad():
                    truth = {name: self._reference_output(_in_float64(few))}
                    loop = {name: self._reference_output(few)} if measured else {}
            self._references[backward] = truth, loop
        return self._references[backward]

    def _reference_output(self, arguments: Arguments) -> Tensor:
        """Output of the reference implementation: the token loop on a CPU, the eager backend on a GPU."""
        if not self.case.on_gpu:
            return self.case.spec.truth(arguments)[0]
        return self.case.spec.ours(arguments | {"backend": "eager"})[0]

    def fed(self) -> Tensor:
        """Gradient of the output; it is zero after the compared tokens."""
        fed = self.case.incoming(self.arguments)
        fed[:, self.tokens :] = 0
        return fed

    def _arguments(self, tokens: int) -> Arguments:
        cut = {name: self._compared_part(name, x, tokens) for name, x in self.arguments.items()}
        if "cu_seqlens" in cut and tokens < self.case.shape.T:
            cut["cu_seqlens"] = cut["cu_seqlens"].clamp(max=tokens)
        return cut

    def _compared_part(self, name: str, x: Any, tokens: int, *, exact: bool = False) -> Any:
        """Select the compared part of an argument, a result or a gradient.

        With `exact` the tokens after that part must be zero; if they are not, the returned part is NaN.
        """
        argument = name if name in self.arguments else name.removeprefix("d")
        if not isinstance(x, Tensor):
            return x
        if self.case.on_gpu:
            x = self._heads_of(argument, x)
        if self.tokens == self.case.shape.T or not of_tokens(self.case, argument):
            return x
        if argument in OF_UPDATES:
            tokens *= self.case.updates
        if exact and bool((x[:, tokens:] != 0).any()):
            return torch.full_like(x[:, :tokens], torch.nan)
        return x[:, :tokens]

    def _heads_of(self, argument: str, x: Tensor) -> Tensor:
        if not self.per_head or argument == "cu_seqlens":
            return x
        axis = 2 if of_tokens(self.case, argument) else 1 if argument == "initial_state" else 0
        group = x.shape[axis] // self.case.shape.H  # 1 if the tensor has the heads of the keys
        rows = [head * group + j for head in self.checked_heads for j in range(group)]
        return x.index_select(axis, torch.tensor(rows, device=x.device))


def of_tokens(case: Case, argument: str) -> bool:
    """Whether an argument, or a result, has a row for each token."""
    return argument in TOKENS and argument not in PARAMETERS.get(case.kind, ())


def _in_float64(arguments: Arguments) -> Arguments:
    """The arguments in float64, without `output_dtype`, so that the result is in float64 too."""
    return {name: x for name, x in widened(arguments).items() if name != "output_dtype"}


def accurate_enough(verdict: Verdict, *, ours: bool) -> bool:
    """Whether a tensor is accurate enough to be timed, though perhaps outside Wyfold's limits."""
    if verdict.passed:
        return True
    measured, limits = verdict.measured, verdict.limits
    if not verdict.reason.startswith("over") or measured.row > WORST_ROW:
        return False
    coarse = not ours and measured.rms <= PRECISION
    may = OUR_ERROR_FACTOR if ours else PEER_ERROR_FACTOR
    return coarse or all(value <= may * limit for value, limit in zip(astuple(measured), astuple(limits)))


def gradients_of(call: Callable[[Arguments], Tensor], arguments: Arguments, fed: Tensor) -> Named:
    asked = leaves(arguments)
    found = torch.autograd.grad(call({**arguments, **asked}), list(asked.values()), fed)
    return {gradient_name(name): gradient for name, gradient in zip(asked, found, strict=True)}
