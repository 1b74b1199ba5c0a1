"""One-hot keys, beta 0 or 1 and integer values: the answers are integers, which must be exact.

An error of an index or a mask cannot hide in rounding.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold.kernels.scan import eager as scan_stage
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

RULES = ("delta_rule", "gated_delta_rule", "kda")
CASES = 20
"""Random calls, unless --draws gives their number."""


def wrong_answers(cases: int) -> list[str]:
    """Descriptions of the random calls whose output differs from `dictionary_reference`."""
    generator, wrong = torch.Generator().manual_seed(3), []

    def pick(*options: int) -> int:
        return options[int(torch.randint(len(options), (), generator=generator))]

    for number in range(cases):
        rule, H = RULES[number % 3], pick(1, 2, 3)
        shape = Shape(pick(1, 2, 3), pick(*range(1, 131)), H, H * pick(1, 2, 3), pick(8, 16, 24), pick(8, 16, 40))
        gate = ("zero", "reset one", "reset last", "reset first")[pick(0, 1, 2, 3)]
        dtype = (torch.float32, torch.bfloat16, torch.float64)[pick(0, 1, 2)]
        lengths = None
        if pick(0, 1):
            shape = replace(shape, B=1)
            lengths = random_lengths(shape.T, generator)
        drawn = inputs.draw("one-hot", rule, shape, gate=gate, dtype=dtype, seed=number)
        if "g" in drawn:  # the weak gate between resets would not be exact
            drawn["g"] = torch.where(drawn["g"].isinf(), -math.inf, 0.0).to(drawn["g"])
        drawn["q"] = inputs.KEYS["one-hot"](tuple(drawn["q"].shape), generator).to(dtype)
        truth = dictionary_reference(drawn, lengths)
        cu = None if lengths is None else torch.tensor([0, *itertools.accumulate(lengths)])
        o, _ = getattr(wyfold, f"chunk_{rule}")(**drawn, scale=1.0, cu_seqlens=cu)
        if not torch.equal(o, truth):
            wrong.append(f"{rule} {shape} {gate} {dtype} lengths {lengths}")
    return wrong


def random_lengths(total: int, generator: torch.Generator) -> list[int]:
    """Random lengths of four sequences, possibly empty, with `total` tokens together."""
    cuts = torch.randint(0, total + 1, (3,), generator=generator).sort().values.tolist()
    return [end - start for start, end in itertools.pairwise([0, *cuts, total])]


def dictionary_reference(arguments: dict, lengths: list[int] | None) -> Tensor:
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


@pytest.mark.long
def test_answers_are_exact(request: pytest.FixtureRequest):
    assert wrong_answers(request.config.getoption("--draws") or CASES) == []


def test_a_shift_by_one_token_is_detected(monkeypatch: pytest.MonkeyPatch):
    usual = scan_stage.scan

    def shifted(inputs, factors, S, table, scale, out, leaving):
        left = usual(inputs, factors, S, table, scale, out, leaving)
        out.copy_(out.roll(1, dims=1))
        return left

    monkeypatch.setattr(scan_stage, "scan", shifted)
    assert wrong_answers(3)


def test_the_dictionary_is_cleared_at_borders_and_resets():
    eye = torch.eye(8)
    arguments = {
        "q": eye[[0, 0, 0, 0]].view(1, 4, 1, 8),
        "k": eye[[0, 1, 0, 1]].view(1, 4, 1, 8),
        "v": torch.arange(4.0).view(1, 4, 1, 1).expand(1, 4, 1, 8) + 1,
        "beta": torch.ones(1, 4, 1),
        "g": torch.zeros(1, 4, 1),
    }
    assert dictionary_reference(arguments, None)[0, :, 0, 0].tolist() == [1, 1, 3, 3]
    assert dictionary_reference(arguments, [1, 3])[0, :, 0, 0].tolist() == [1, 0, 3, 3]
    arguments["g"] = torch.tensor([0, 0, 0, -torch.inf]).view(1, 4, 1)
    assert dictionary_reference(arguments, None)[0, :, 0, 0].tolist() == [1, 1, 3, 0]
