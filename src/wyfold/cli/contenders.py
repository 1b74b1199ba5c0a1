"""Who runs in `bench`, on which tensors, and whether what comes out is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wyfold.cli import results
from wyfold.cli.peers import Peer
from wyfold.cli.subjects import FED, GRADIENT_OF, NARROW, PER_TOKEN, SUBJECTS, Arguments, Named, bound, widened
from wyfold.reference import inputs
from wyfold.reference.error import Verdict, judge
from wyfold.reference.shapes import Shape

OPS = {
    "delta_rule": "chunk_delta_rule",
    "gdn": "chunk_gated_delta_rule",
    "kda": "chunk_kda",
    "ttt": "chunk_ttt_linear",
    "recurrent_delta_rule": "fused_recurrent_delta_rule",
    "recurrent_gdn": "fused_recurrent_gated_delta_rule",
    "recurrent_kda": "fused_recurrent_kda",
    "recurrent_ttt": "fused_recurrent_ttt_linear",
    "solve": "solve_tril",
    "kkt": "chunk_scaled_dot_kkt",
    "conv": "causal_conv1d",
    "norm": "rms_norm_gated",
}
"""What the command line calls an operator -> its public name, also the name of its subject."""

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "fast": lambda x: -5 * torch.special.ndtr(x),  # uniform, mean -2.5 per token
    "mid": lambda x: F.logsigmoid(x).clamp(min=-5),
    "slow": lambda x: -2e-3 * torch.special.ndtr(x),  # uniform, mean -0.001
}
"""Standard normal numbers -> natural-log decays per token."""

OURS = "wyfold"
TOKEN_ARGUMENTS = frozenset({"q", "k", "v", "g", "beta", "eta", "x", "residual", "A"})
CHECKED = 200
"""Tokens whose gradients are compared: the float64 recurrence keeps a state for each."""
CHECKED_FORWARD = 4096
"""Longest sequence whose outputs are compared as a whole."""


@dataclass(frozen=True)
class Case:
    """One operator on one set of tensors."""

    op: str
    shape: Shape
    gate: str
    dtype: str
    mode: str
    seed: int

    @property
    def backward(self) -> bool:
        return self.mode == "fwdbwd"

    def arguments(self) -> Arguments:
        """Keyword arguments of the operator, the same whenever they are drawn."""
        subject = SUBJECTS[OPS[self.op].replace("fused_recurrent", "chunk")]  # both forms on the same tensors
        drawn = subject.arguments(self.shape, getattr(torch, self.dtype), self.seed)
        for name in ("initial_state", "initial_state_bias", "output_final_state"):
            drawn.pop(name, None)
        if "g" in drawn and self.gate != "none":
            generator = torch.Generator().manual_seed(2 * FED + self.seed)
            noise = torch.randn(drawn["g"].shape, generator=generator, dtype=torch.float64)
            drawn["g"] = GATES[self.gate](noise).to(drawn["g"].dtype)
        if "beta" in drawn and "q" in drawn:
            drawn["use_qk_l2norm_in_kernel"] = True
        return drawn


@dataclass(frozen=True)
class Contender:
    """Who runs a case: `call` takes its arguments and returns the output; `ran` says which code that is."""

    name: str
    ran: str
    call: Callable[[Arguments], Tensor]


def contenders(op: str, peers: Sequence[Peer]) -> list[Contender]:
    """Ours first, then every peer that has this operator; one whose version lacks it is said to, and left out."""
    subject = SUBJECTS[OPS[op]]
    found = [Contender(OURS, f"wyfold.{subject.operator}", lambda arguments: subject.ours(arguments)[0])]
    for peer in peers:
        if subject.operator in peer.adapters:
            try:
                found.append(_theirs(peer, subject.operator))
            except ImportError as error:
                results.say(f"{peer.name} is installed, but not with this operator: {error}")
    return found


def _theirs(peer: Peer, operator: str) -> Contender:
    ran, call = peer.adapters[operator]()
    return Contender(
        peer.name, ran, lambda arguments: call(*(arguments[name] for name in ("q", "k", "v", "g", "beta")))
    )


def prepared(contender: Contender, case: Case, arguments: Arguments) -> Callable[[], Tensor | tuple[Tensor, ...]]:
    """One run of a case, ready to be timed: the output, or the gradients of all floating arguments."""
    if not case.backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return contender.call(arguments)

        return forward

    leaves = _leaves(arguments)
    ready = {**arguments, **leaves}
    with torch.no_grad():
        fed = inputs.incoming(contender.call(arguments), FED)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(contender.call(ready), list(leaves.values()), fed)

    return both


def _leaves(arguments: Arguments) -> Named:
    return {
        name: value.detach().requires_grad_()
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


# --- is it right -----------------------------------------------------------------------------------------------------


def errors(contender: Contender, case: Case, arguments: Arguments) -> list[Verdict]:
    """Verdicts on the very call that will be timed, against the float64 recurrence.

    Outputs are compared over the whole sequence up to `CHECKED_FORWARD` tokens. For the gradients the loss reaches the
    first `CHECKED` tokens only, so that the recurrence need not run further; gradients of later tokens must be zero.
    """
    subject, T = SUBJECTS[OPS[case.op]], case.shape.T
    narrow = getattr(torch, case.dtype) in NARROW
    tokens = min(T, CHECKED)
    shown = T if T <= CHECKED_FORWARD and not narrow else tokens
    with torch.no_grad():
        o = contender.call(arguments)
        truth = {"o": subject.truth(widened(_first(arguments, shown)))[0]}
        got = {"o": o[:, :shown]}
        loop = {"o": subject.truth(_first(arguments, shown))[0]} if narrow else {}
    if case.backward:
        fed = inputs.incoming(o, FED)
        fed[:, tokens:] = 0
        got |= _first(_gradients(contender.call, arguments, fed), tokens, exact=True)
        few, fed = _first(arguments, tokens), fed[:, :tokens]
        truth |= _gradients(lambda a: subject.truth(a)[0], widened(few), fed.double())
        if narrow:
            loop |= _gradients(lambda a: subject.truth(a)[0], few, fed)
    return [
        judge(
            x,
            truth[name],
            loop[name] if x.dtype in NARROW else None,
            name=name,
            target=bound(name, x.dtype, subject.family),
            per_token=PER_TOKEN.get(name) == x.ndim,
        )
        for name, x in got.items()
    ]


def _gradients(call: Callable[[Arguments], Tensor], arguments: Arguments, fed: Tensor) -> Named:
    leaves = _leaves(arguments)
    found = torch.autograd.grad(call({**arguments, **leaves}), list(leaves.values()), fed)
    return {GRADIENT_OF.get(name, f"d{name}"): gradient for name, gradient in zip(leaves, found, strict=True)}


def _first(tensors: dict[str, Any], tokens: int, *, exact: bool = False) -> dict[str, Any]:
    """The first tokens of every per-token tensor; `exact`: where the rest is not zero, NaN."""
    cut = dict(tensors)
    for name, x in tensors.items():
        if name.removeprefix("d") in TOKEN_ARGUMENTS and isinstance(x, Tensor):
            cut[name] = x[:, :tokens]
            if exact and bool((x[:, tokens:] != 0).any()):
                cut[name] = torch.full_like(cut[name], torch.nan)
    return cut
