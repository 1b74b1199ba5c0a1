"""`prepare`: normalised and activated inputs, and the folded factors of every chunk."""

from typing import Any

import pytest
import torch

from wyfold import reference
from wyfold.kernels import table
from wyfold.kernels.records import ChunkFactors
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime.chunk_layout import dense_table, packed_table
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.index.eager import to_chunks

F64 = torch.float64
LENGTHS = [20, 0, 17]
PLAIN = DeltaOptions(
    operator="test", recurrent=False, scale=1.0, qk_l2norm=False, activation="given", lower_bound=0.0, clamp=0.0,
    beta_logit=False, beta_most=1.0, state_v_first=False, state_dtype=F64, final_state=True, chunk_size=16,
    checkpoint_every=0, save=False, keep_factors=False, backend="eager",
)  # fmt: skip


def loaded(stage, a: dict[str, Any], grid, **changes: Any):
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    return stage.load(*(a.get(name) for name in names), grid, PLAIN._replace(**changes))


@pytest.fixture
def stage(backend: str):
    return table.kernel_module("prepare", backend)


@pytest.fixture(params=["dense", "packed"])
def grid(request: pytest.FixtureRequest):
    return dense_table(1, 37, 16) if request.param == "dense" else packed_table(torch.tensor(LENGTHS), 16)


@pytest.mark.parametrize("rule", ["delta_rule", "gated_delta_rule", "kda"])
def test_inputs_as_the_recurrence_sees_them(rule: str, grid, stage, float64_bounds):
    gate = "model" if rule != "delta_rule" else None
    a = inputs.draw("random", rule, Shape(1, 37, 2, 4, 8, 16), gate=gate, keys="huge", beta="logits", dtype=F64)
    got = loaded(stage, a, grid, qk_l2norm=True, activation="softplus", beta_logit=True, beta_most=2.0)
    wanted = {"q": reference.l2norm(a["q"]), "k": reference.l2norm(a["k"]), "v": a["v"]}
    wanted["beta"] = reference.beta_sigmoid(a["beta"], 2.0)[..., None]
    if rule == "gated_delta_rule":
        wanted["g"] = reference.gdn_gate(a["g"], a["A_log"], a["dt_bias"])[..., None]
    if rule == "kda":
        wanted["g"] = reference.kda_gate(a["g"], a["A_log"], a["dt_bias"])
    for name, x in wanted.items():
        tiles = to_chunks(x, grid, 4, F64)
        if name == "beta":  # in padding beta is undefined: its key is zero
            padding = to_chunks(torch.ones_like(x), grid, 4, F64)
            float64_bounds.output(name, getattr(got, name) * padding, tiles)
        else:
            float64_bounds.output(name, getattr(got, name), tiles)
    assert (got.g is None) == (rule == "delta_rule")


def test_no_strength_is_one_and_no_norm_keeps_none(grid, stage):
    a = inputs.draw("random", "delta_rule", Shape(1, 37, 1, 1, 8, 8), dtype=F64)
    del a["beta"]
    got = loaded(stage, a, grid)
    assert torch.equal(got.beta, torch.ones_like(got.beta)) and got.rq is got.rk is got.g is None


@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("rule", ["delta_rule", "gated_delta_rule", "kda"])
def test_factors(rule: str, C: int, stage, float64_bounds):
    """A agrees with a general solver, E = A^T (k decayed to the end), F = P A; kept factors are returned unchanged."""
    a = inputs.draw("random", rule, Shape(2, 70, 1, 2, 8, 16), dtype=F64)
    got_inputs = loaded(stage, a, dense_table(2, 70, C))
    got = stage.fold(got_inputs)
    n = got.J.shape[0]
    assert n == 2 * 2 * -(-70 // C)
    eye = torch.eye(C, dtype=F64).expand(n, C, C)
    float64_bounds.output("A", got.A, torch.linalg.solve(eye + got_inputs.beta * got.J, eye))
    decay = 1.0 if got.G is None else torch.exp(got.G[:, -1:] - got.G)
    float64_bounds.output("E", got.E, got.A.mT @ (got_inputs.k * decay))
    float64_bounds.output("F", got.F, got.P @ got.A)
    for x in (got.A, got.F, got.P):
        assert not x.triu(1).any()
    assert not got.J.triu().any()
    kept = ChunkFactors(None, *(torch.randn_like(x) for x in got[1:]))
    again = stage.fold(got_inputs, kept)
    assert all(x is y for x, y in zip(again[1:], kept[1:]))
    assert again.G is got.G is None or torch.equal(again.G, got.G)


def test_padding_writes_nothing(stage):
    a = inputs.draw("random", "kda", Shape(1, 37, 1, 1, 8, 8), gate="model", dtype=F64)
    got = loaded(stage, a, dense_table(1, 37, 16), activation="softplus", qk_l2norm=True)
    factors = stage.fold(got)
    assert not got.g[-1, 5:].any() and not got.k[-1, 5:].any() and not got.q[-1, 5:].any()
    assert not factors.E[-1, 5:].any() and not factors.F[-1, 5:].any()
    assert torch.equal(factors.G[-1, 5:], factors.G[-1, 4:5].expand(11, -1))
