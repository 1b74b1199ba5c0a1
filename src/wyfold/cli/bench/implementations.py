"""Who runs in `bench`, and whether what comes out is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import wyfold
from wyfold import serving
from wyfold.cli.bench.cases import Case, gradient_name, leaves, served
from wyfold.cli.bench.peers import Adapter, Peer
from wyfold.cli.catalog import OPS, OURS, VARIANTS
from wyfold.cli.operators import NARROW, PER_TOKEN, Arguments, Named, bound, widened
from wyfold.reference.error import Verdict, judge, rms

TOKEN_ARGUMENTS = frozenset({"q", "k", "v", "g", "beta", "eta", "x", "A", "o", "y"})
HEAD_AXIS = {**dict.fromkeys(("q", "k", "v", "g", "beta", "eta", "A", "o", "y"), 2), "initial_state": 1}
HEAD_AXIS |= dict.fromkeys(("w", "b", "A_log", "dt_bias"), 0)
KEY_HEADS = frozenset({"q", "k"})
"""Tensors with a row per key head; the others of `HEAD_AXIS` have one per value head."""

CHECKED = 200
"""On a CPU: tokens whose gradients are compared, since the float64 recurrence keeps a state for each."""
CHECKED_FORWARD = 4096
"""On a CPU: longest sequence whose outputs are compared as a whole."""
CHECKED_HEADS = 4
"""On a GPU: key heads, with their value heads, that are compared, the first and the last among them."""
OURS_MAY, PEERS_MAY = 2.0, 4.0
"""How many times its limits an error may be before the result counts as wrong and gets no time. Ours above its limits
gets one, and fails the run."""
PRECISION = 1e-2
"""A relative error up to this is a peer's choice of arithmetic, tf32 for float32 say, and no mistake."""
WORST_ROW = 0.5
"""Error of a row, in its own lengths, from which on something is wrong with that row; rounding alone came to 0.08."""


@dataclass(frozen=True)
class Contender:
    """Who runs a case.

    Attributes:
        name: As the command line has it.
        ran: Which code that is, and in which way it is asked.
        call: Takes the case's arguments, and what `prepare` adds to them; returns the output.
        prepare: Makes further arguments without gradient, once, outside of all times.
        backward: Whether it has one.
    """

    name: str
    ran: str
    call: Callable[[Arguments], Tensor]
    prepare: Callable[[Arguments], Arguments] = lambda arguments: {}
    backward: bool = True

    def __call__(self, arguments: Arguments) -> Tensor:
        return self.call(arguments | self.prepare(arguments))


def contenders(case: Case, peers: Sequence[Peer], variants: Sequence[str] = ()) -> list[Contender]:
    """Ours first, also with each of the flags it is to be timed with, then every peer that has this operator."""
    operator = OPS[case.op]
    found = [_ours(case, "")]
    for flag in variants:
        # What is kept for a backward shows only where there is one.
        if case.op in VARIANTS[flag] and (case.backward or flag != "disable_recompute"):
            found.append(_ours(case, flag))
    for peer in peers:
        for adapter in peer.adapters.get(operator, ()):
            found.append(_theirs(peer, adapter))
    return found


def _ours(case: Case, flag: str) -> Contender:
    flags: Arguments = {flag: True} if flag else {}
    if case.backend:
        flags["backend"] = case.backend
    if case.decoding:
        return Contender(
            OURS,
            "wyfold.serving.decode",
            lambda arguments: serving.decode(**served(arguments | flags)),
            lambda arguments: {"pool": arguments["initial_state"].clone()},
            backward=False,
        )
    name = f"wyfold.{case.subject.operator}" + (f", {flag}" if flag else "")
    return Contender(OURS, name, lambda arguments: case.subject.ours(arguments | flags)[0])


def _theirs(peer: Peer, adapter: Adapter) -> Contender:
    """The contender; where its library cannot be loaded, one that says so when it is called."""
    name = f"{peer.name}, {adapter.way}" if adapter.way else peer.name
    try:
        loaded = adapter.load()
    except Exception as error:  # another library's import may fail in any way; its row will say how
        reason = error

        def refuse(arguments: Arguments) -> Tensor:
            raise reason

        return Contender(peer.name, f"{name} (not loaded)", refuse)
    ran = loaded.ran + (f", {adapter.way}" if adapter.way else "")
    return Contender(peer.name, ran, loaded.call, loaded.prepare, adapter.backward)


def prepared(
    contender: Contender, case: Case, arguments: Arguments, fed: Tensor | None = None
) -> Callable[[], Tensor | tuple[Tensor, ...]]:
    """One run of a case, ready to be timed: the output, or the gradients of all floating arguments.

    Args:
        contender: Who runs it.
        case: What is run.
        arguments: Of the case.
        fed: Gradient of the output, for a backward; the case's own unless given.
    """
    ready = arguments | contender.prepare(arguments)
    if not case.backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return contender.call(ready)

        return forward

    asked = leaves(arguments)
    ready |= asked
    gradient = case.incoming(arguments) if fed is None else fed

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(contender.call(ready), list(asked.values()), gradient)

    return both


def plan(contender: Contender, case: Case, arguments: Arguments) -> dict[str, Any]:
    """What ours would launch for these arguments; nothing for a peer."""
    if contender.name != OURS:
        return {}
    asked = {"backend": case.backend} if case.backend else {}
    if case.decoding:
        found = wyfold.explain(serving.decode, **served(arguments | asked))
    else:
        found = wyfold.explain(getattr(wyfold, OPS[case.op]), **(arguments | asked))
    return {
        "backend": found.backend,
        "forward": found.forward,
        "backward": found.backward,
        "chunk": found.chunk_size,
        "copies": found.copies,
    }


# --- is it right -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What the judge found.

    Attributes:
        verdicts: On each tensor, against the limits that ours is held to, the worst error first.
        right: Whether the result may have a time; it need not be within all limits.
        eager: On a GPU, the relative error of the eager backend in the dtype, by tensor.
        lost: Tensors that are not finite somewhere outside of what was compared.
    """

    verdicts: tuple[Verdict, ...]
    right: bool
    eager: dict[str, float] = field(default_factory=dict)
    lost: tuple[str, ...] = ()

    @property
    def within(self) -> bool:
        """Whether every tensor is within the limits that ours is held to."""
        return self.right and all(verdict.passed for verdict in self.verdicts)

    @property
    def row(self) -> dict[str, Any]:
        """What a row of results says of it."""
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
            "not_finite_elsewhere": self.lost,
            "correct": self.right,
            "within_limits": self.within,
            "failed": not self.within,
        }


@dataclass
class Judge:
    """What the results of one set of tensors are held to; it is computed once for every mode and contender.

    On a CPU the truth is the float64 token loop, and in 16 bits the loop in that dtype is the yardstick. Outputs are
    compared over the whole sequence up to `CHECKED_FORWARD` tokens. For the gradients the loss reaches the first
    `CHECKED` tokens only, so that the loop need not run further; gradients of later tokens must be zero. `everything`:
    all tokens in any case.

    On a GPU the truth is the eager backend in float64 (`wyfold verify` measures it there against the token loop), for
    `heads` of the key heads and their value heads, since heads have nothing to do with each other, over all tokens;
    everything else must be finite. The recurrences are held to the absolute targets of the dtype of their inputs and to
    `WORST_ROW`; in 16 bits the others have the eager backend in the dtype as yardstick.
    """

    case: Case
    arguments: Arguments
    heads: int = CHECKED_HEADS
    everything: bool = False
    _standards: dict[bool, tuple[Named, Named]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s = self.case.shape
        self.narrow = getattr(torch, self.case.dtype) in NARROW
        self.tokens = s.T if self.everything else min(s.T, CHECKED)
        self.shown = s.T if s.T <= CHECKED_FORWARD and not self.narrow else self.tokens
        self.headed = "k" in self.arguments or "A" in self.arguments
        some = min(self.heads, s.H)
        self.picked = sorted({round(i * (s.H - 1) / max(1, some - 1)) for i in range(some)})

    @property
    def by(self) -> str:
        """What was compared with what, for the record."""
        if not self.case.on_gpu:
            return f"token loop in float64; outputs of {self.shown} tokens, gradients of a loss on {self.tokens}"
        if not self.headed:
            return "eager in float64; everything"
        return f"eager in float64; all tokens of key heads {self.picked} of {self.case.shape.H} and their value heads"

    def finding(self, contender: Contender, backward: bool, *, ours: bool) -> Finding:
        """On the very call that will be timed."""
        with torch.no_grad():
            o = contender(self.arguments)
        return self.judged(o, gradients_of(contender, self.arguments, self.fed()) if backward else {}, ours=ours)

    def judged(self, o: Tensor, gradients: Named, *, ours: bool) -> Finding:
        """On an output, and on the gradients that came of `fed`, if there are any."""
        got, finite = self._compared(o, gradients)
        truth, yardstick = self._standard(bool(gradients))
        verdicts = [self._verdict(name, x, truth[name], yardstick.get(name)) for name, x in got.items()]
        verdicts.sort(key=lambda verdict: verdict.measured.rms, reverse=True)
        right = all(tolerable(verdict, ours=ours) for verdict in verdicts)
        eager = {name: rms(x, truth[name]) for name, x in yardstick.items()} if self.case.on_gpu else {}
        lost = tuple(name for name, fine in finite.items() if not fine)
        return Finding(tuple(verdicts), right and not lost, eager, lost)

    def _verdict(self, name: str, got: Tensor, truth: Tensor, yardstick: Tensor | None) -> Verdict:
        if name == "deta":  # [B, T, HV, 1]: a number a token, no row of a head
            got, truth, yardstick = (
                got.squeeze(-1),
                truth.squeeze(-1),
                None if yardstick is None else yardstick.squeeze(-1),
            )
        family, per_token = self.case.family, PER_TOKEN.get(name) == got.ndim
        target = bound(name, got.dtype, family)
        if self.case.on_gpu and self.case.recurrence:
            target, yardstick = bound(name, getattr(torch, self.case.dtype), family), None
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
        """What is compared, and of each whole tensor whether it is finite."""
        name = self.case.subject.outputs[0]
        got = {name: self._cut(name, o, self.shown)}
        got |= {of: self._cut(of, x, self.tokens, exact=True) for of, x in gradients.items()}
        if not self.case.on_gpu:
            return got, {}
        return got, {of: bool(x.isfinite().all()) for of, x in ({name: o} | gradients).items()}

    def _standard(self, backward: bool) -> tuple[Named, Named]:
        """Truth, and in 16 bits the yardstick."""
        if backward not in self._standards:
            name = self.case.subject.outputs[0]
            few = self._arguments(self.shown)
            with torch.no_grad():
                truth = {name: self._exact(_exactly(few))}
                loop = {name: self._exact(few)} if self.narrow else {}
            if backward:
                few, fed = self._arguments(self.tokens), self._cut(name, self.fed(), self.tokens)
                truth |= gradients_of(self._exact, _exactly(few), fed.double())
                if self.narrow:
                    loop |= gradients_of(self._exact, few, fed)
            self._standards[backward] = truth, loop
        return self._standards[backward]

    def _exact(self, arguments: Arguments) -> Tensor:
        """The output by other means than those on trial."""
        if not self.case.on_gpu:
            return self.case.subject.truth(arguments)[0]
        return self.case.subject.ours(arguments | {"backend": "eager"})[0]

    def fed(self) -> Tensor:
        """Gradient of the output; on a CPU it reaches the first tokens only."""
        fed = self.case.incoming(self.arguments)
        if not self.case.on_gpu:
            fed[:, self.tokens :] = 0
        return fed

    def _arguments(self, tokens: int) -> Arguments:
        cut = {name: self._cut(name, x, tokens) for name, x in self.arguments.items()}
        if "cu_seqlens" in cut and not self.case.on_gpu:
            cut["cu_seqlens"] = cut["cu_seqlens"].clamp(max=tokens)
        return cut

    def _cut(self, name: str, x: Any, tokens: int, *, exact: bool = False) -> Any:
        """What is compared of an argument, a result or a gradient; `exact`: where the rest is not zero, NaN."""
        argument = name if name in self.arguments else name.removeprefix("d")
        if not isinstance(x, Tensor):
            return x
        if self.case.on_gpu:
            return self._heads_of(argument, x)
        if argument not in TOKEN_ARGUMENTS:
            return x
        if exact and bool((x[:, tokens:] != 0).any()):
            return torch.full_like(x[:, :tokens], torch.nan)
        return x[:, :tokens]

    def _heads_of(self, argument: str, x: Tensor) -> Tensor:
        axis = HEAD_AXIS.get(argument)
        if axis is None or not self.headed:
            return x
        group = 1 if argument in KEY_HEADS or "A" in self.arguments else self.case.shape.HV // self.case.shape.H
        rows = [head * group + j for head in self.picked for j in range(group)]
        return x.index_select(axis, torch.tensor(rows, device=x.device))


def _exactly(arguments: Arguments) -> Arguments:
    """The arguments in float64, with a result in it."""
    return {name: x for name, x in widened(arguments).items() if name != "output_dtype"}


def tolerable(verdict: Verdict, *, ours: bool) -> bool:
    """Whether a tensor is right, if perhaps further from the truth than ours may be."""
    if verdict.passed:
        return True
    measured, limits = verdict.measured, verdict.limits
    if not verdict.reason.startswith("over") or measured.row > WORST_ROW:
        return False
    coarse = not ours and measured.rms <= PRECISION
    may = OURS_MAY if ours else PEERS_MAY
    return coarse or all(value <= may * limit for value, limit in zip(astuple(measured), astuple(limits)))


def gradients_of(call: Callable[[Arguments], Tensor], arguments: Arguments, fed: Tensor) -> Named:
    asked = leaves(arguments)
    found = torch.autograd.grad(call({**arguments, **asked}), list(asked.values()), fed)
    return {gradient_name(name): gradient for name, gradient in zip(asked, found, strict=True)}
