"""Checks 1, 2, 5, 6 and 7: accuracy of the results."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

import wyfold
from wyfold.cli.operators import OPERATOR_SPECS, Arguments, OperatorSpec, judged, measured, verdicts
from wyfold.cli.scorecard.check import Check, CheckResult, Scope
from wyfold.reference import error, inputs
from wyfold.reference.shapes import Shape

RULES = {
    "delta_rule": "chunk_delta_rule",
    "gated_delta_rule": "chunk_gated_delta_rule",
    "kda": "chunk_kda",
    "ttt_linear": "chunk_ttt_linear",
}
"""Token loop -> chunk form; the first three are the delta rules."""
DELTA = tuple(RULES)[:3]


# --- check 1: definitions agree ---------------------------------------------------------------------------------------

AGREE = 1e-10


def definitions_agree(scope: Scope) -> CheckResult:
    """Check 1: token loop, chunk form, recurrent form, split calls and finite differences agree in float64."""
    result = CheckResult(scope)
    shape = Shape(2, 70, 2, 4, 16, 24)
    for spec in OPERATOR_SPECS.values():
        for verdict in judged(spec, shape, torch.float64, scope.seed):
            result.error(verdict.measured.rms, AGREE, f"{spec.name}: {verdict.name}")
    for rule in RULES:
        _split_and_compose(rule, result)
        holds = _finite_differences(rule, scope.seed)
        result.case(holds, f"{rule}: the gradients are not the slopes of the outputs")
    return result


def _split_and_compose(rule: str, result: CheckResult) -> None:
    """Compare two calls, the second from the state of the first, with one call of the token loop."""
    spec = OPERATOR_SPECS[RULES[rule]]
    arguments = spec.arguments(Shape(2, 70, 2, 4, 16, 24), torch.float64, result.scope.seed)
    whole = measured(spec.truth, arguments, spec.outputs, seed=result.scope.seed)
    halves = measured(lambda a: in_two_calls(spec, a, 32), arguments, spec.outputs, seed=result.scope.seed)
    for name in whole:
        result.error(error.rms(halves[name], whole[name]), AGREE, f"{rule} in two calls: {name}")


def in_two_calls(spec: OperatorSpec, arguments: Arguments, cut: int) -> tuple[Tensor, ...]:
    """Outputs of two calls: on the tokens before `cut`, and on the others from the final state of the first call."""
    before, *states = spec.ours(tokens(arguments, slice(0, cut)))
    handed = dict(zip(("initial_state", "initial_state_bias"), states))
    after, *states = spec.ours(tokens(arguments, slice(cut, None)) | handed)
    return torch.cat([before, after], dim=1), *states


def tokens(arguments: Arguments, which: slice) -> Arguments:
    """The arguments, with per-token tensors sliced along time."""
    per_token = ("q", "k", "v", "g", "beta", "eta")
    return {name: value[:, which] if name in per_token else value for name, value in arguments.items()}


def _finite_differences(rule: str, seed: int) -> bool:
    spec = OPERATOR_SPECS[RULES[rule]]
    arguments = spec.arguments(Shape(1, 18, 1, 2, 8, 8), torch.float64, seed)
    leaves = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}

    def outputs(*values: Tensor) -> tuple[Tensor, ...]:
        return spec.ours(arguments | dict(zip(leaves, values)))

    # Fast mode: one random direction instead of the full Jacobian.
    values = [x.clone().requires_grad_() for x in leaves.values()]
    return torch.autograd.gradcheck(outputs, values, fast_mode=True, raise_exception=False)


# --- check 2: exact answers -------------------------------------------------------------------------------------------

EXACT_CASES = 200


def exact_answers(scope: Scope) -> CheckResult:
    """Check 2: with one-hot keys, beta 0 or 1 and integer values the answers are integers, which must be exact."""
    result = CheckResult(scope, promised=EXACT_CASES)
    generator = torch.Generator().manual_seed(scope.seed)

    def pick(*options: int) -> int:
        return options[int(torch.randint(len(options), (), generator=generator))]

    for number in range(scope.count(EXACT_CASES)):
        rule, H = DELTA[number % 3], pick(1, 2, 3)
        shape = Shape(pick(1, 2, 3), pick(*range(1, 131)), H, H * pick(1, 2, 3), pick(8, 16, 24), pick(8, 16, 40))
        gate = ("zero", "reset one", "reset last", "reset first")[pick(0, 1, 2, 3)]
        dtype = (torch.float32, torch.bfloat16, torch.float64)[pick(0, 1, 2)]
        lengths = None
        if pick(0, 1):
            shape = replace(shape, B=1)
            lengths = _lengths(shape.T, generator)
        drawn = inputs.draw("one-hot", rule, shape, gate=gate, dtype=dtype, seed=scope.seed + number)
        if "g" in drawn:  # the weak gate between resets would not be exact
            drawn["g"] = torch.where(drawn["g"].isinf(), -math.inf, 0.0).to(drawn["g"])
        drawn["q"] = inputs.KEYS["one-hot"](tuple(drawn["q"].shape), generator).to(dtype)
        truth = dictionary_reference(drawn, lengths)
        cu = None if lengths is None else torch.tensor([0, *itertools.accumulate(lengths)])
        o, _ = getattr(wyfold, RULES[rule])(**drawn, scale=1.0, cu_seqlens=cu)
        result.case(torch.equal(o, truth), f"case {number}: {rule} {shape} {gate} {dtype} lengths {lengths}")
    return result


def _lengths(total: int, generator: torch.Generator) -> list[int]:
    """Random lengths of four sequences, possibly empty, with `total` tokens together."""
    cuts = torch.randint(0, total + 1, (3,), generator=generator).sort().values.tolist()
    return [end - start for start, end in itertools.pairwise([0, *cuts, total])]


def dictionary_reference(arguments: Arguments, lengths: list[int] | None) -> Tensor:
    """Reference by a dictionary: a query returns the last value written under its key, or zero.

    Args:
        arguments: One-hot q and k, beta 0 or 1, g 0 or -inf.
        lengths: Lengths of packed sequences; None if the rows of the batch are the sequences.
    """
    q, k, v = arguments["q"], arguments["k"], arguments["v"]
    B, T, HV, _ = v.shape
    group = HV // q.shape[2]
    asked, key, write = q.argmax(-1), k.argmax(-1), arguments["beta"] == 1
    g = arguments.get("g")
    o = torch.zeros_like(v)
    starts = {0} if lengths is None else set(itertools.accumulate(lengths, initial=0))
    for b, head in itertools.product(range(B), range(HV)):
        memory: dict[int, Tensor] = {}
        for t in range(T):
            forgets = g is not None and bool(g[b, t, head].flatten()[0].isinf())
            if t in starts or forgets:
                memory = {}
            if write[b, t, head]:
                memory[int(key[b, t, head // group])] = v[b, t, head]
            found = memory.get(int(asked[b, t, head // group]))
            if found is not None:
                o[b, t, head] = found
    return o


# --- checks 5 and 6: keys and gates -----------------------------------------------------------------------------------

KEY_KINDS = ("normal", "positive", "identical", "near-identical", "two clusters", "rank 4", "vocabulary")
STRENGTHS = ("half", ".835", "one", "two")


def correlated_keys(scope: Scope) -> CheckResult:
    """Check 5: repeated and correlated keys at every write strength, forward and backward.

    With beta below 2, in float32 against its targets. At beta 2 without decay every token is a reflection without
    damping, and rounding accumulates along the sequence in every chunk form. The inputs are then bfloat16, and the
    check is whether the chunk form adds an error to that of their rounding.
    """
    kinds = list(itertools.product(KEY_KINDS, STRENGTHS, DELTA))
    result = CheckResult(scope, promised=len(kinds))
    shape = Shape(1, 130, 1, 1, 64, 64)
    for keys, beta, rule in kinds[:: 10 if scope.quick else 1]:
        dtype = torch.bfloat16 if beta == "two" else torch.float32
        drawn = inputs.draw("random", rule, shape, keys=keys, beta=beta, gate="-1e-3", dtype=dtype, seed=scope.seed)
        _against_loop(result, OPERATOR_SPECS[RULES[rule]], drawn, f"{rule}, {keys} keys, beta {beta}")
    return result


GATE_KINDS = (*inputs.GATES, *inputs.MODEL_GATES)
DECAYS = 1e-3


def every_gate(scope: Scope) -> CheckResult:
    """Check 6: every gate from 0 to -inf is legal, its gradients included, and decays the state by exp(g)."""
    result = CheckResult(scope, promised=2 * len(GATE_KINDS))
    shape = Shape(1, 70, 1, 2, 16, 16)
    for gate, rule in itertools.product(GATE_KINDS[:: 10 if scope.quick else 1], DELTA[1:]):
        if gate == "model bounded" and rule != "kda":
            gate = "model"
        beta = "logits" if gate == "spiky" else "sigmoid"
        drawn = inputs.draw("random", rule, shape, gate=gate, beta=beta, state="normal", seed=scope.seed)
        _against_loop(result, OPERATOR_SPECS[RULES[rule]], drawn | {"output_final_state": True}, f"{rule}, gate {gate}")
        if gate not in inputs.MODEL_GATES:
            result.error(_decay(rule, drawn), DECAYS, f"{rule}, gate {gate}: what is left of a state")
    return result


def _decay(rule: str, drawn: Arguments) -> float:
    """Relative error of the decay of a state by one token without a write; absolute below 1e-30."""
    last = tokens(drawn, slice(-1, None))
    last["beta"] = torch.zeros_like(last["beta"])
    last.pop("use_beta_sigmoid_in_kernel", None)
    last["initial_state"] = torch.ones_like(last["initial_state"])
    _, left = getattr(wyfold, RULES[rule])(**last, output_final_state=True)
    g = last["g"][:, 0].double()
    wanted = g.exp().reshape(*g.shape[:2], -1, 1).expand(left.shape)
    return ((left - wanted).abs() / wanted.clamp(min=1e-30)).max().item()


def _against_loop(result: CheckResult, spec: OperatorSpec, arguments: Arguments, where: str) -> None:
    """Record a case: every tensor must satisfy the rule of acceptance against the token loop."""
    names = spec.outputs if arguments.get("output_final_state") else spec.outputs[:1]
    few = replace(spec, outputs=names)
    got = measured(few.ours, arguments, names, seed=result.scope.seed)
    found = verdicts(few, arguments, got, result.scope.seed, waive=True)
    errors = [verdict.measured.rms for verdict in found if verdict.passed and not verdict.waived]
    result.worst = max(result.worst or 0.0, *errors)
    lines = [str(verdict) for verdict in found if not verdict.passed]
    result.case(not lines, f"{where}: {'; '.join(lines)}")


# --- check 7: TF32 ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reduced_precision_allowed() -> Iterator[None]:
    """Context manager that allows TF32 in float32 matrix products for the whole process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def float32_means_float32(scope: Scope) -> CheckResult:
    """Check 7: float32 results keep float32 accuracy when TF32 is allowed globally."""
    result = CheckResult(scope)
    for spec in OPERATOR_SPECS.values():
        arguments = spec.arguments(Shape(1, 130, 1, 2, 64, 64), torch.float32, scope.seed)
        with reduced_precision_allowed():
            got = measured(spec.ours, arguments, spec.outputs, backward=spec.backward, seed=scope.seed)
        for verdict in verdicts(spec, arguments, got, scope.seed):
            result.error(verdict.measured.rms, verdict.limits.rms, f"{spec.name}: {verdict.name}")
    return result


CHECKS = (
    Check(1, "all definitions agree", "relative error <= 1e-10, float64", definitions_agree),
    Check(2, "index and mask errors cannot hide", f"0 bits, >= {EXACT_CASES} cases", exact_answers),
    Check(5, "correlated keys", "84 of 84 finite and within the rule of acceptance", correlated_keys),
    Check(6, "every gate is legal", "finite; decays within 1e-3; gradients within the rule of acceptance", every_gate),
    Check(7, "float32 stays float32 under TF32", "o <= 1e-5, gradients <= 1e-4", float32_means_float32),
)
