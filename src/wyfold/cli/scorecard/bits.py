"""Checks 12 to 15 and 29: results are equal bit for bit in any batch, packing, memory layout and order of calls."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from wyfold.cli.operators import OPERATOR_SPECS, Arguments, Named, OperatorSpec, bound, incoming, measured, widened
from wyfold.cli.scorecard.accuracy import DELTA, RULES, in_two_calls
from wyfold.cli.scorecard.check import Check, CheckResult, Scope
from wyfold.reference import error, inputs
from wyfold.reference.shapes import Shape

PER_SEQUENCE = ("initial_state", "initial_state_bias", "state", "state_bias", "dh0", "dc0")
PER_TOKEN = ("q", "k", "v", "g", "beta", "eta", "o", "dq", "dk", "dv", "dg", "dbeta", "deta")
PACKINGS = 200
CAUSAL_CASES = 200


class _Draw:
    """Seeded random choices."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def pick(self, *options: int) -> int:
        return options[self.below(len(options))]

    def below(self, end: int) -> int:
        return int(torch.randint(end, (), generator=self.generator))


def draw_call(
    rule: str, number: int, T: int, *, sequences: int | None, B: int = 1, seed: int = 0
) -> tuple[OperatorSpec, Arguments]:
    """Draw a small call of a rule's chunk form. Over many numbers, all options of the rule occur.

    Args:
        rule: One of `RULES`.
        number: Number of the case, which selects widths, head groups, gates and dtype.
        T: Tokens.
        sequences: Number of initial states; None for B.
        B: Batch size.
        seed: Seed of the tensors.

    Returns:
        The operator and its arguments.
    """
    shape = Shape(B, T, (1, 2)[number % 2], (2, 4)[number // 2 % 2], 8, (8, 16)[number // 4 % 2])
    if rule == "ttt_linear":
        shape = replace(shape, V=shape.K)
    options: dict[str, str] = {}
    if rule in DELTA[1:]:
        options["gate"] = ("weak", "any", "model", "spiky", "alternating")[number % 5]
    dtype = (torch.float32, torch.bfloat16, torch.float32, torch.float64)[number % 4]
    drawn = inputs.draw(
        "random", rule, shape, state="normal", sequences=sequences, dtype=dtype, seed=seed + number, **options
    )
    return OPERATOR_SPECS[RULES[rule]], drawn | {"output_final_state": True}


def differing_tensors(one: Named, other: Named) -> str:
    """Names of the tensors whose bits differ between two results. NaN equals NaN."""
    return ", ".join(name for name in one if not _same_bits(one[name], other[name]))


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x.nan_to_num(nan=7.25), y.nan_to_num(nan=7.25))


# --- check 12: packing ------------------------------------------------------------------------------------------------


def packed_equals_separate(scope: Scope) -> CheckResult:
    """Check 12: each sequence of a random packing, and each row of a batch, has the bits of a call of it alone."""
    result = CheckResult(scope, promised=PACKINGS * len(RULES))
    for number, rule in itertools.product(range(scope.count(PACKINGS)), RULES):
        draw = _Draw(scope.seed + number)
        lengths = [draw.pick(0, 1, 2, 15, 16, 17, 40, draw.below(90)) for _ in range(draw.pick(1, 2, 3, 4))]
        spare = draw.pick(0, 0, 3)
        spec, arguments = draw_call(rule, number, sum(lengths) + spare, sequences=len(lengths), seed=scope.seed)
        cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=(torch.int64, torch.int32)[number % 2])
        rows = [slice(int(cu[n]), int(cu[n + 1])) for n in range(len(lengths))]
        wrong = _differences_from_separate_calls(
            spec, arguments | {"cu_seqlens": cu}, [(slice(0, 1), tokens) for tokens in rows], scope.seed
        )
        result.case(not wrong, f"case {number}: {rule}, lengths {lengths}, {spare} spare: {'; '.join(wrong)}")
        if number % 8 == 0:
            spec, arguments = draw_call(rule, number, 1 + draw.below(70), sequences=None, B=3, seed=scope.seed)
            wrong = _differences_from_separate_calls(
                spec, arguments, [(slice(b, b + 1), slice(None)) for b in range(3)], scope.seed
            )
            result.case(not wrong, f"case {number}: {rule}, batch of 3: {'; '.join(wrong)}")
    return result


def _differences_from_separate_calls(
    spec: OperatorSpec, arguments: Arguments, places: list[tuple[slice, slice]], seed: int
) -> list[str]:
    """Differences between one call of all sequences and a call of each sequence alone.

    Args:
        spec: Operator.
        arguments: Arguments of the call of all sequences.
        places: Rows of the batch and tokens of each sequence, in the order of the states.
        seed: Seed of the output gradients.
    """
    together, fed = _measured(spec, arguments, seed)
    shared = {name: x for name, x in arguments.items() if name != "cu_seqlens"}
    wrong = []
    for n, (rows, some) in enumerate(places):
        alone = measured(spec.ours, _part(shared, rows, some, n), spec.outputs, fed=_part(fed, rows, some, n))
        own = {name: x for name, x in together.items() if name in (*PER_TOKEN, *PER_SEQUENCE)}
        names = differing_tensors(_part(own, rows, some, n), alone)
        wrong += [f"sequence {n}: {names}"] if names else []
    return wrong


def _measured(spec: OperatorSpec, arguments: Arguments, seed: int) -> tuple[Named, Named]:
    """Result of `measured`, and the output gradients it used."""
    with torch.no_grad():
        fed = incoming(dict(zip(spec.outputs, spec.ours(arguments), strict=True)), seed)
    return measured(spec.ours, arguments, spec.outputs, fed=fed), fed


def _part(tensors: Arguments, rows: slice, some: slice, n: int) -> Arguments:
    """Tensors of one sequence: its tokens and its states; shared tensors stay complete."""
    return {
        name: x[rows, some] if name in PER_TOKEN else x[n : n + 1] if name in PER_SEQUENCE else x
        for name, x in tensors.items()
    }


# --- check 13: causality ----------------------------------------------------------------------------------------------


def outputs_are_causal(scope: Scope) -> CheckResult:
    """Check 13: changed inputs from a token on change no bit of earlier outputs, nor of the gradients of those."""
    result = CheckResult(scope, promised=CAUSAL_CASES)
    for number in range(scope.count(CAUSAL_CASES)):
        rule = tuple(RULES)[number % len(RULES)]
        draw = _Draw(scope.seed + number)
        T = 2 + draw.below(100)
        t = 1 + draw.below(T - 1)
        spec, arguments = draw_call(rule, number, T, sequences=None, B=1 + number % 2, seed=scope.seed)
        _, others = draw_call(rule, number, T, sequences=None, B=1 + number % 2, seed=scope.seed + 10_000)
        changed = {
            name: torch.cat([x[:, :t], others[name][:, t:]], dim=1) if name in PER_TOKEN else x
            for name, x in arguments.items()
        }
        before, after = (_prefix(spec, a, t, scope.seed) for a in (arguments, changed))
        names = differing_tensors(before, after)
        result.case(not names, f"case {number}: {rule}, T {T}, changed from {t} on: {names}")
    return result


def _prefix(spec: OperatorSpec, arguments: Arguments, t: int, seed: int) -> Named:
    """Outputs of the first t tokens, and the gradients of a loss on these tokens alone."""
    first = replace(spec, outputs=spec.outputs[:1])
    with torch.no_grad():
        fed = incoming({"o": first.ours(arguments)[0]}, seed)
    fed["o"][:, t:] = 0
    found = measured(first.ours, arguments, first.outputs, fed=fed)
    return {name: x[:, :t] if name in PER_TOKEN else x for name, x in found.items()}


# --- check 14: split calls --------------------------------------------------------------------------------------------


def split_equals_whole(scope: Scope) -> CheckResult:
    """Check 14: two calls, split at a multiple of 64, have the bits of one call; other splits meet the targets."""
    result = CheckResult(scope)
    T = 200
    for rule, number in itertools.product(RULES, range(scope.count(10))):
        spec, arguments = draw_call(rule, 4 * number, T, sequences=None, seed=scope.seed)
        whole = dict(zip(spec.outputs, spec.ours(arguments)))
        for cut in (64, 128, 192):
            halves = dict(zip(spec.outputs, in_two_calls(spec, arguments, cut)))
            names = differing_tensors(whole, halves)
            result.case(not names, f"{rule}, case {number}, cut at {cut}: {names}")
        if rule in DELTA:  # a split inside a mini-batch of TTT-Linear changes the model
            halves = dict(zip(spec.outputs, in_two_calls(spec, arguments, 1 + 7 * number)))
            truth = dict(zip(spec.outputs, spec.truth(widened(arguments))))
            found = [error.judge(x, truth[name], name=name, target=bound(name, x.dtype)) for name, x in halves.items()]
            lines = [str(verdict) for verdict in found if not verdict.passed]
            result.case(not lines, f"{rule}, cut at {1 + 7 * number}: {'; '.join(lines)}")
    return result


# --- check 15: strides ------------------------------------------------------------------------------------------------


def _wider(
    dim: int, extra: Callable[[int], int], take: Callable[[Tensor, int, int], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Copy x into a view of a tensor that is larger along `dim` and NaN elsewhere."""

    def stretched(x: Tensor) -> Tensor:
        size = list(x.shape)
        size[dim] = extra(size[dim])
        view = take(x.new_full(size, torch.nan), dim % x.ndim, x.shape[dim])
        return view.copy_(x)

    return stretched


def _stored(order: Callable[[int], list[int]]) -> Callable[[Tensor], Tensor]:
    """Store x with its dimensions in another memory order."""

    def stored(x: Tensor) -> Tensor:
        dims = order(x.ndim)
        back = [dims.index(i) for i in range(x.ndim)]
        return x.permute(dims).contiguous().permute(back)

    return stored


def _every_second(x: Tensor, dim: int, size: int) -> Tensor:
    return x[(slice(None),) * dim + (slice(0, 2 * size, 2),)]


def _expanded(dim: int) -> Callable[[Tensor], Tensor]:
    def expanded(x: Tensor) -> Tensor:
        return x.narrow(dim, 0, 1).expand(x.shape)

    return expanded


def _one_element_in(x: Tensor) -> Tensor:
    return x.new_full((x.numel() + 1,), torch.nan)[1:].view(x.shape).copy_(x)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "last two dimensions swapped": _stored(lambda n: [*range(n - 2), n - 1, n - 2] if n > 1 else [0]),
    "heads before tokens": _stored(lambda n: [0, 2, 1, *range(3, n)] if n > 2 else list(range(n))),
    "tokens innermost": _stored(lambda n: [0, *range(2, n), 1] if n > 1 else [0]),
    "batch innermost": _stored(lambda n: [*range(1, n), 0]),
    "dimensions reversed": _stored(lambda n: list(reversed(range(n)))),
    "first columns of a wider tensor": _wider(-1, lambda n: n + 3, lambda x, dim, n: x.narrow(dim, 0, n)),
    "last columns of a wider tensor": _wider(-1, lambda n: 3 * n, lambda x, dim, n: x.narrow(dim, 2 * n, n)),
    "every second column": _wider(-1, lambda n: 2 * n, _every_second),
    "every second token": _wider(1, lambda n: 2 * n, _every_second),
    "every second row of the batch": _wider(0, lambda n: 2 * n, _every_second),
    "one element into its memory": _one_element_in,
    "expanded over the batch": _expanded(0),
    "expanded over tokens": _expanded(1),
    "expanded over the last dimension": _expanded(-1),
}
"""Name of a memory layout -> function that stores a tensor so. Expanded layouts repeat the first slice."""


def strides_do_not_matter(scope: Scope) -> CheckResult:
    """Check 15: every argument and output gradient in every layout gives the bits of contiguous tensors."""
    result = CheckResult(scope, promised=12 * len(RULES))
    kinds = dict(itertools.islice(STRIDES.items(), 0, None, 7 if scope.quick else 1))
    for rule in RULES:
        number = 2 if rule in DELTA[1:] else 0  # with the model's gate, so that its parameters are arguments
        spec, arguments = draw_call(rule, number, 37, sequences=None, B=2, seed=scope.seed)
        with torch.no_grad():
            fed = incoming(dict(zip(spec.outputs, spec.ours(arguments))), scope.seed)
        usual = measured(spec.ours, arguments, spec.outputs, fed=fed)
        places = [(arguments, name) for name, x in arguments.items() if isinstance(x, Tensor)] + [
            (fed, name) for name in fed
        ]
        for kind, (tensors, name) in itertools.product(kinds, places):
            x = tensors[name]
            if x.ndim < 2 and "token" in kind:
                continue  # a vector has no second dimension
            strange = kinds[kind](x)
            expected = (
                usual if "expanded" not in kind else _with(spec, arguments, fed, tensors, name, strange.contiguous())
            )
            names = differing_tensors(expected, _with(spec, arguments, fed, tensors, name, strange))
            result.case(not names, f"{rule}, {'incoming ' if tensors is fed else ''}{name} {kind}: {names}")
    return result


def _with(spec: OperatorSpec, arguments: Arguments, fed: Named, tensors: Arguments, name: str, x: Tensor) -> Named:
    """Results with one argument or output gradient replaced. The operator gets its strides unchanged."""
    replaced = tensors | {name: x}
    arguments, fed = (arguments, replaced) if tensors is fed else (replaced, fed)
    return measured(spec.ours, arguments, spec.outputs, fed=fed, copy=False)


# --- check 29: no stale state -----------------------------------------------------------------------------------------

THREADS = 8


def no_stale_state(scope: Scope) -> CheckResult:
    """Check 29: boundaries edited in place, alternating shapes and concurrent threads do not change a bit."""
    result = CheckResult(scope)
    for rule in RULES:
        spec, arguments = draw_call(rule, 0, 70, sequences=2, seed=scope.seed)
        cu = torch.tensor([0, 30, 70])
        arguments["cu_seqlens"] = cu
        measured(spec.ours, arguments, spec.outputs)
        cu[1] = 17
        edited = measured(spec.ours, arguments, spec.outputs)
        fresh = measured(spec.ours, arguments | {"cu_seqlens": torch.tensor([0, 17, 70])}, spec.outputs)
        names = differing_tensors(fresh, edited)
        result.case(not names, f"{rule}, boundaries edited in place: {names}")
    calls = [
        draw_call(rule, n, T, sequences=None, seed=scope.seed) for rule in RULES for n, T in enumerate((1, 33, 64, 70))
    ]
    alone = [_run(call) for call in calls]
    for number, call in [*enumerate(calls), *reversed(list(enumerate(calls)))]:
        names = differing_tensors(alone[number], _run(call))
        result.case(not names, f"call {number} among other shapes: {names}")
    for number, names in enumerate(_at_once(calls, alone)):
        result.case(not names, f"thread {number} of {THREADS}: {names}")
    return result


def _run(call: tuple[OperatorSpec, Arguments]) -> Named:
    spec, arguments = call
    return measured(spec.ours, arguments, spec.outputs)


def _at_once(calls: list[tuple[OperatorSpec, Arguments]], alone: list[Named]) -> list[str]:
    """Differences found by each of several threads that run all calls, each thread in another order."""
    found = ["did not finish"] * THREADS
    gate = threading.Barrier(THREADS)

    def work(number: int) -> None:
        gate.wait()
        order = [(number + i) % len(calls) for i in range(len(calls))]
        found[number] = "; ".join(
            f"call {i}: {names}" for i in order if (names := differing_tensors(alone[i], _run(calls[i])))
        )

    workers = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return found


CHECKS = (
    Check(12, "packed equals separate", f"0 bits, >= {PACKINGS} packings x four rules", packed_equals_separate),
    Check(13, "outputs do not depend on later tokens", f"0 bits, >= {CAUSAL_CASES} cases", outputs_are_causal),
    Check(
        14,
        "split equals unsplit",
        "0 bits at multiples of 64; elsewhere within the float32 targets",
        split_equals_whole,
    ),
    Check(
        15, "strides do not matter", "0 bits, >= 12 stride kinds on every argument and gradient", strides_do_not_matter
    ),
    Check(29, "no stale state", "0 bits", no_stale_state),
)
