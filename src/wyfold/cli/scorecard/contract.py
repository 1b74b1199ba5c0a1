"""Checks 17, 18, 19 and 26: a call is accurate or refused, at every length; operators are registered with PyTorch."""

from __future__ import annotations

import contextlib
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import wyfold
from wyfold import TTTState, serving
from wyfold.cli import described
from wyfold.cli.operators import OPERATOR_SPECS, Arguments, OperatorSpec, judged, measured, verdicts
from wyfold.cli.scorecard.accuracy import DELTA, RULES
from wyfold.cli.scorecard.check import Check, CheckResult, Scope
from wyfold.cli.scorecard.refusals import REFUSALS, Refusal
from wyfold.kernels import table
from wyfold.reference import inputs
from wyfold.reference.shapes import PACKINGS, Shape

# --- check 17: refusals -----------------------------------------------------------------------------------------------

REFUSED = 60


@contextlib.contextmanager
def launches_counted() -> Iterator[list[str]]:
    """Context manager that lists the stages launched in this process."""
    usual, launched = table.kernel_module, []

    def counting(stage: str, backend: str) -> Any:
        launched.append(stage)
        return usual(stage, backend)

    table.kernel_module = counting
    try:
        yield launched
    finally:
        table.kernel_module = usual


def invalid_arguments_are_named(scope: Scope) -> CheckResult:
    """Check 17: every invalid call is refused before any launch, by argument, expected and given value."""
    result = CheckResult(scope, promised=REFUSED)
    for refusal in REFUSALS[:: 10 if scope.quick else 1]:
        failure = refusal_fault(refusal)
        result.case(not failure, f"{refusal}: {failure}")
    return result


def refusal_fault(refusal: Refusal) -> str:
    """Why the refusal of an invalid call is insufficient; empty if it is good."""
    arguments = refusal.arguments()
    with launches_counted() as launched:
        try:
            getattr(wyfold, refusal.operator)(**arguments)
        except (TypeError, ValueError) as error:
            return _complaint(refusal, error, launched)
    return "was accepted"


def _complaint(refusal: Refusal, error: Exception, launched: list[str]) -> str:
    text = str(error)
    if not isinstance(error, refusal.error) or (
        refusal.error is ValueError and isinstance(error, wyfold.UnsupportedError)
    ):
        return f"raised {type(error).__name__}: {text}"
    if launched:
        return f"launched {', '.join(launched)} before it was refused"
    if not re.search(rf"\b{refusal.argument}\b", text):
        return f"is not named in {text!r}"
    # Python's TypeError for an unknown or missing keyword has the form `operator() ...`.
    return "" if text.startswith((f"{refusal.operator}: ", f"{refusal.operator}() ")) else f"came as {text!r}"


# --- check 18: options ------------------------------------------------------------------------------------------------

FACTORS: dict[str, tuple[Any, ...]] = {
    "rule": DELTA,
    "form": ("chunk", "fused_recurrent"),
    "K": (8, 24, 64),
    "V": (8, 40),
    "heads": ((1, 1), (2, 4), (1, 3)),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "gate": ("weak", "spiky", "model", "model bounded", "reset one"),
    "beta": ("sigmoid", "logits", "logits doubled", "none"),
    "layout": ("dense", "packed", "spare rows", "transposed"),
    "norm": (False, True),
    "v_first": (False, True),
    "state": ("none", "normal"),
    "state_dtype": (None, torch.bfloat16, torch.float16),
    "chunk_size": (None, 16, 32, 64),
    "recompute": (True, False),
    "safe": (False, True),
    "backend": (None, "eager"),
}
MISSING = ("triton", "gluon")
"""Backends that do not run on the CPU: every combination is also requested from them, and must be refused."""

Combination = dict[str, Any]


def pairwise(seed: int) -> list[Combination]:
    """A small set of combinations in which every pair of values of two factors occurs."""
    generator = torch.Generator().manual_seed(seed)
    names = list(FACTORS)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(FACTORS[a]))
        for j in range(len(FACTORS[b]))
    }
    combinations: list[Combination] = []
    while missing:
        must = dict(min(missing))  # so that every combination covers a missing pair
        tries = [_filled(must, names, generator) for _ in range(30)]
        best = max(tries, key=lambda picked: len(missing & _pairs(picked, names)))
        missing -= _pairs(best, names)
        combinations.append({name: FACTORS[name][best[name]] for name in names})
    return combinations


def _filled(must: dict[str, int], names: list[str], generator: torch.Generator) -> dict[str, int]:
    drawn = {name: int(torch.randint(len(FACTORS[name]), (), generator=generator)) for name in names}
    return drawn | must


def _pairs(picked: dict[str, int], names: list[str]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    return {((a, picked[a]), (b, picked[b])) for a, b in itertools.combinations(names, 2)}


def options_are_accurate_or_refused(scope: Scope) -> CheckResult:
    """Check 18: each combination of the delta rules' options is accurate or refused, and runs on the requested backend.

    TTT-Linear has other options, which are tested in pairs by the test suite.
    """
    combinations = pairwise(scope.seed)
    result = CheckResult(scope, promised=len(combinations))
    for number, combination in enumerate(combinations[:: 10 if scope.quick else 1]):
        failure = outcome(combination, scope.seed + number)
        shown = ", ".join(f"{name} {value}" for name, value in combination.items())
        result.case(not failure, f"{shown}: {failure}")
    return result


def outcome(combination: Combination, seed: int) -> str:
    """What is wrong with the outcome of a combination; empty if it is accurate or refused."""
    arguments, own = combination_arguments(combination, seed)
    operator = f"{combination['form']}_{combination['rule']}"
    spec = OperatorSpec(operator, operator, combination["rule"], lambda *_: arguments, ("o", "state"), fixed=own)
    for backend in MISSING:
        try:
            replace(spec, fixed=own | {"backend": backend}).ours(arguments)
        except wyfold.UnsupportedError as refusal:
            if backend not in refusal.reasons:
                return f"{backend} was refused without a reason"
        else:
            return f"{backend} was demanded, and something else ran"
    plan = wyfold.explain(getattr(wyfold, operator), **arguments, **own)
    if plan.backend != (combination["backend"] or "eager"):
        return f"{plan.backend} would run"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = measured(spec.ours, arguments, spec.outputs, seed=seed, copy=False)
    failed = [str(verdict) for verdict in verdicts(spec, arguments, got, seed, waive=True) if not verdict.passed]
    return "; ".join(failed)


def combination_arguments(combination: Combination, seed: int) -> tuple[Arguments, Arguments]:
    """Arguments of a combination for operator and loop, and for the operator alone. Skips options the rule lacks."""
    (H, HV), packed = combination["heads"], combination["layout"] in ("packed", "spare rows")
    shape = Shape(1 if packed else 2, 37, H, HV, combination["K"], combination["V"])
    gate = combination["gate"] if combination["rule"] == "kda" or combination["gate"] != "model bounded" else "model"
    drawn = inputs.draw(
        "random",
        combination["rule"],
        shape,
        gate=gate,
        beta="logits" if combination["beta"].startswith("logits") else "sigmoid",
        state=combination["state"],
        sequences=3 if packed else None,
        dtype=combination["dtype"],
        seed=seed,
    )
    if combination["beta"] == "none":
        del drawn["beta"]
    if combination["beta"] == "logits doubled":
        drawn["allow_neg_eigval"] = True
    if packed:
        drawn["cu_seqlens"] = torch.tensor(
            [0, 20, 20, 37 if combination["layout"] == "packed" else 30], dtype=torch.int32
        )
    if combination["layout"] == "transposed":
        drawn |= {name: drawn[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "k", "v")}
    if combination["v_first"] and "initial_state" in drawn:
        drawn["initial_state"] = drawn["initial_state"].mT
    if combination["safe"] and combination["rule"] == "kda" and not gate.startswith("model"):
        drawn["safe_gate"] = True
    drawn |= {
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": combination["norm"],
        "state_v_first": combination["v_first"],
        "state_dtype": combination["state_dtype"],
    }
    own: Arguments = {"backend": combination["backend"]}
    if combination["form"] == "chunk":
        own |= {"chunk_size": combination["chunk_size"], "disable_recompute": not combination["recompute"]}
    return drawn, own


# --- check 19: lengths ------------------------------------------------------------------------------------------------

LONGEST = 130


def every_length(scope: Scope) -> CheckResult:
    """Check 19: every length from 1 to 130 and every packing, with empty sequences and padding, in float64."""
    result, step = CheckResult(scope, promised=LONGEST * len(RULES)), 10 if scope.quick else 1
    for T, rule in itertools.product(range(1, LONGEST + 1, step), RULES):
        failed = _at_length(OPERATOR_SPECS[RULES[rule]], T, scope.seed)
        if T % 7 == 0:  # the recurrent form does not depend on a grid over the length
            failed += _at_length(OPERATOR_SPECS[RULES[rule].replace("chunk", "fused_recurrent")], T, scope.seed)
        result.case(not failed, f"{rule}, T {T}: {'; '.join(failed)}")
    for (name, packing), rule in itertools.product(list(PACKINGS.items())[::step], RULES):
        failed = _packed(OPERATOR_SPECS[RULES[rule]], torch.tensor(packing.cu_seqlens), packing.tokens, scope.seed)
        result.case(not failed, f"{rule}, {name}: {'; '.join(failed)}")
    return result


def _at_length(spec: OperatorSpec, T: int, seed: int) -> list[str]:
    found = judged(spec, Shape(1, T, 1, 2, 8, 8), torch.float64, seed)
    return [str(verdict) for verdict in found if not verdict.passed]


def _packed(spec: OperatorSpec, cu: Tensor, T: int, seed: int) -> list[str]:
    """Failures of a packed call in float64: inaccurate tensors, nonzero padding, changed states of empty sequences."""
    N, end = cu.shape[0] - 1, int(cu[-1])
    drawn = inputs.draw(
        "random", spec.loop, Shape(1, T, 1, 2, 8, 8), state="normal", sequences=N, dtype=torch.float64, seed=seed
    )
    arguments = drawn | {"output_final_state": True, "cu_seqlens": cu}
    for name in ("q", "k", "v", "g", "beta", "eta"):
        if name in arguments:
            arguments[name][:, end:] = torch.nan  # must never be read
    got = measured(spec.ours, arguments, spec.outputs, seed=seed)
    failed = [str(verdict) for verdict in verdicts(spec, arguments, got, seed) if not verdict.passed]
    rows = [
        name
        for name, x in got.items()
        if name in ("o", "dq", "dk", "dv", "dg", "dbeta", "deta") and bool((x[:, end:] != 0).any())
    ]
    empty = cu.diff() == 0
    copied = torch.equal(got["state"][empty], arguments["initial_state"][empty])
    return (
        failed
        + [f"spare rows of {name} are not zero" for name in rows]
        + ([] if copied else ["an empty state changed"])
    )


# --- check 26: operators of PyTorch -----------------------------------------------------------------------------------

LENGTHS = (17, 33, 40, 64, 65, 70, 90, 100, 128, 130)
COMPILES = 2


class _OperatorRecorder(TorchDispatchMode):
    """Records one call of every operator in the namespace `wyfold`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "wyfold":
            copied = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in args)
            self.calls.setdefault(func.name(), (func, copied))
        return func(*args, **(kwargs or {}))


def recorded_calls(seed: int = 0) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Name of every registered operator -> the operator and the arguments of one call of it."""
    recorder = _OperatorRecorder()
    with recorder:
        for spec in OPERATOR_SPECS.values():
            arguments = spec.arguments(Shape(1, 20, 1, 2, 8, 8), torch.float32, seed)
            measured(spec.ours, arguments, spec.outputs, backward=spec.backward, seed=seed)
        _decoded(seed)
        # `after` orders a collective in a compiled graph, `delta_received` uses its result. Neither occurs in
        # other calls of a single process.
        torch.ops.wyfold.after(torch.ones(2, 3), [torch.ones(4)])
        torch.ops.wyfold.delta_received(torch.ones(2, 1, 1, 2, 8, 16), [2, 4, 0, 1], 8)
    return recorder.calls


def _decoded(seed: int) -> None:
    """Decode one token of two sequences from pools of three. Serving functions are not in `OPERATOR_SPECS`."""
    drawn = inputs.draw("random", "kda", Shape(2, 1, 1, 2, 8, 8), dtype=torch.float32, seed=seed)
    pool = torch.zeros(3, 2, 8, 8)
    q, k, v, g, beta = (drawn[name] for name in ("q", "k", "v", "g", "beta"))
    serving.decode(q, k, v, g, beta, pool, state_v_first=False)
    serving.conv1d_update(torch.ones(2, 16), torch.zeros(3, 16, 3), torch.ones(16, 4))
    stand = TTTState(
        pool, pool[:, :, :1].clone(), pool.clone(), pool[:, :, :1].clone(), torch.zeros(3, dtype=torch.int32)
    )
    serving.ttt_decode(q, k, v, torch.ones(2, 8), torch.zeros(2, 8), beta, stand)


def registered() -> set[str]:
    """Names of the operators that the package registers, with two exceptions.

    Kernels over the ranks of a group are tested in tests/interpret/test_context.py. `once` computes nothing: it marks
    arguments for the compiler and is removed in lowering (tests/reports/test_second_derivatives.py).
    """
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()} - {"wyfold::once"}
    return {name for name in names if name.startswith("wyfold::") and not name.startswith("wyfold::delta_rank_")}


def registered_operators(scope: Scope) -> CheckResult:
    """Check 26: opcheck on every registered operator; full graphs with backward, two compiles for ten lengths."""
    calls, some = recorded_calls(scope.seed), slice(None, None, 10 if scope.quick else 1)
    result = CheckResult(scope, promised=len(calls) + len(OPERATOR_SPECS))
    for name in sorted(registered() - {name.partition(".")[0] for name in calls}):
        result.case(False, f"{name}: no call of it was seen")
    for name, (operator, arguments) in sorted(calls.items())[some]:
        result.case(*_opcheck(name, operator, arguments))
    for spec in list(OPERATOR_SPECS.values())[some]:
        compiles = compiled(spec, LENGTHS[:: 5 if scope.quick else 1], scope.seed)
        result.case(compiles <= COMPILES, f"{spec.name}: {compiles} compiles for {len(LENGTHS)} lengths")
    return result


def _opcheck(name: str, operator: Any, arguments: tuple[Any, ...]) -> tuple[bool, str]:
    try:
        torch.library.opcheck(operator, arguments)
    except Exception as error:  # opcheck may raise any exception
        return False, f"{name}: {type(error).__name__}: {described(error)}"
    return True, ""


def compiled(spec: OperatorSpec, lengths: tuple[int, ...], seed: int = 0) -> int:
    """Number of compilations with `fullgraph=True` for calls of these lengths, backward included.

    Raises:
        ValueError: a compiled result differs from the plain call by a bit.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    whole: Callable[[Arguments], tuple[Tensor, ...]] = torch.compile(spec.ours, fullgraph=True, backend=counter)
    for T in lengths:
        arguments = spec.arguments(Shape(1, T, 1, 2, 8, 8), torch.float32, seed)
        plain, graph = (
            measured(call, arguments, spec.outputs, backward=spec.backward, seed=seed) for call in (spec.ours, whole)
        )
        for name, x in plain.items():
            if not torch.equal(x, graph[name]):
                raise ValueError(f"{spec.name}: compiled at T {T}, {name} has other bits")
    return counter.frame_count


CHECKS = (
    Check(
        17,
        "invalid arguments are named before any launch",
        f">= {REFUSED} kinds; argument, expected, got; 0 launches",
        invalid_arguments_are_named,
    ),
    Check(
        18,
        "every combination is accurate or refused",
        "every pair of options accurate or refused; 0 silent fallbacks",
        options_are_accurate_or_refused,
    ),
    Check(19, "every length", "all pass; padding exactly 0; states copied exactly", every_length),
    Check(26, "operators of PyTorch", "opcheck passes; 0 breaks; <= 2 compiles for 10 lengths", registered_operators),
)
