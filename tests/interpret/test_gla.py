"""GLA and DeltaProduct on kernels: segments, and bits that must not depend on how a call is made."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.interpret.test_delta_ops import verdicts
from torch import Tensor

import wyfold
from wyfold import reference
from wyfold.reference import inputs
from wyfold.reference.error import judge, require
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target
from wyfold.runtime import segment_rule

PER_TOKEN = ("q", "k", "v", "g")


def call(device: torch.device, shape: Shape, N: int | None = None, gate: str = "any", **more: Any) -> dict[str, Any]:
    a = inputs.draw("random", "gla", shape, gate=gate, state="normal", sequences=N, **more)
    a |= {"output_final_state": True, "chunk_size": 16, "backend": "triton"}
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in a.items()}


def test_segments(device, guarded, results):
    a = inputs.draw("random", "gla", Shape(1, 104, 1, 2, 24, 16), gate="weak", state="normal", sequences=3)
    a |= {"output_final_state": True, "chunk_size": 16, "cu_seqlens": torch.tensor([0, 70, 70, 100])}
    with segment_rule.forced(3):
        assert wyfold.explain(wyfold.chunk_gla, **a).segments > 1
        require(*verdicts("gla", a, "both", "random", device, guarded, results))


@pytest.mark.parametrize(
    ("dtype", "scalar"),
    [(torch.float32, True), pytest.param(torch.bfloat16, False, marks=pytest.mark.release_if_interpreted)],
    ids=str,
)
def test_packed_is_separate_and_repeats(dtype: torch.dtype, scalar: bool, device, results):
    borders = [0, 17, 17, 35, 36]
    a = call(device, Shape(1, 39, 1, 2, 24, 16), 4, dtype=dtype)
    if scalar:
        a["g"] = a["g"][..., 0].contiguous()
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    for x in (*(a[name] for name in PER_TOKEN), fed["o"]):
        x[:, 36:] = torch.nan
    cu = torch.tensor(borders, device=device)
    packed, again = (results(wyfold.chunk_gla, a, None, fed, cu_seqlens=cu) for _ in range(2))
    assert all(torch.equal(again[name], x) for name, x in packed.items())
    for n, (begin, end) in enumerate(pairwise(borders)):
        alone = {name: x[:, begin:end] if name in PER_TOKEN else x for name, x in a.items()}
        alone["initial_state"] = a["initial_state"][n : n + 1]
        got = results(wyfold.chunk_gla, alone, None, {"o": fed["o"][:, begin:end], "state": fed["state"][n : n + 1]})
        for name, x in got.items():
            mine = packed[name][n : n + 1] if "state" in name else packed[name][:, begin:end]
            assert torch.equal(mine, x), (name, n)


def test_split_at_a_chunk_and_kept_factors(device, results):
    a = call(device, Shape(1, 40, 1, 2, 16, 24), dtype=torch.bfloat16)
    whole = results(wyfold.chunk_gla, a)
    kept = results(wyfold.chunk_gla, a, disable_recompute=True)
    assert all(torch.equal(kept[name], x) for name, x in whole.items())
    parts, state = [], a["initial_state"]
    for begin, end in ((0, 16), (16, 40)):
        piece = {name: x[:, begin:end] if name in PER_TOKEN else x for name, x in a.items()}
        o, state = wyfold.chunk_gla(**piece | {"initial_state": state})
        parts.append(o)
    assert torch.equal(torch.cat(parts, 1), whole["o"]) and torch.equal(state, whole["state"])


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_long_keys(form: str, device, results):
    """Keys of length 100, with which a delta rule would diverge: nothing of the state is erased."""
    a = call(device, Shape(1, 40, 1, 1, 16, 16), gate="weak")
    a["k"] = 100 * a["k"]
    if form == "fused_recurrent":
        del a["chunk_size"]
    got = results(getattr(wyfold, f"{form}_gla"), a)
    names = (*PER_TOKEN, "initial_state")
    wide = {name: a[name].double().cpu() for name in names}
    fed = {name: inputs.incoming(got[name].double().cpu(), seed) for seed, name in enumerate(("o", "state"))}
    truth = results(reference.gla, wide, None, fed, output_final_state=True)
    rows = {"dinitial_state": "dh0"}
    require(*(judge(got[n].cpu(), x, name=n, target=target(rows.get(n, n), torch.float32)) for n, x in truth.items()))


def test_delta_product(device, results):
    """Interleaved rows on kernels have the bits of the gated delta rule on the same rows."""
    a = inputs.draw("random", "gated_delta_rule", Shape(1, 40, 1, 2, 16, 24), state="normal")
    a = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in a.items()}
    last, first = torch.zeros(40, dtype=torch.bool), torch.zeros(40, dtype=torch.bool)
    last[1::2], first[::2] = True, True
    rows = a | {"q": a["q"] * last.to(device)[:, None, None], "g": a["g"] * first.to(device)[:, None]}
    o, state = wyfold.chunk_gated_delta_rule(**rows, output_final_state=True, backend="triton")
    short = a | {"q": a["q"][:, 1::2], "g": a["g"][:, ::2]}
    got, last_state = wyfold.chunk_gated_delta_product(
        **short, num_householder=2, output_final_state=True, backend="triton"
    )
    assert torch.equal(got, o[:, 1::2]) and torch.equal(last_state, state)
