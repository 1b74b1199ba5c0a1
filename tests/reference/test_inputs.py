"""Drawn inputs are reproducible and have the properties their names promise."""

import math

import pytest
import torch
from torch import Tensor

from wyfold.reference import inputs
from wyfold.reference.inputs import draw
from wyfold.reference.shapes import CHUNK_SIZES, PACKINGS, WIDTHS, Shape, every_offset

SHAPE = Shape(B=2, T=130, H=2, HV=4, K=16, V=16)


def tensors(arguments: dict) -> dict[str, Tensor]:
    return {n: x for n, x in arguments.items() if isinstance(x, Tensor)}


@pytest.mark.parametrize("family", inputs.FAMILIES)
@pytest.mark.parametrize("rule", inputs.RULES)
def test_same_seed_same_numbers_in_every_dtype(family, rule):
    wide = draw(family, rule, SHAPE, state="normal", dtype=torch.float64)
    again = draw(family, rule, SHAPE, state="normal", dtype=torch.float64)
    other = draw(family, rule, SHAPE, state="normal", dtype=torch.float64, seed=1)
    half = draw(family, rule, SHAPE, state="normal", dtype=torch.bfloat16)
    for n, x in tensors(wide).items():
        assert torch.equal(x, again[n]), n
        assert torch.equal(x.to(half[n].dtype), half[n]), n
    assert not torch.equal(wide["v"], other["v"])
    assert half["q"].dtype == torch.bfloat16 and half["initial_state"].dtype == torch.float32
    assert {"q", "k", "v"} <= wide.keys() and ("g" in wide) == (rule in ("gated_delta_rule", "kda", "gla"))


def keys(name: str) -> Tensor:
    return draw("random", "delta_rule", SHAPE, keys=name, dtype=torch.float64)["k"]


@pytest.mark.parametrize("name", inputs.KEYS)
def test_keys_have_the_length_of_their_names(name):
    length = torch.linalg.vector_norm(keys(name), dim=-1)
    wanted = {"zero": 0.0, "tiny": 1e-4, "huge": 1e4}.get(name, 1.0)
    assert (length - wanted).abs().max() <= 1e-14 * wanted


def test_keys_are_correlated_as_their_names_say():
    def cosines(name: str) -> Tensor:
        k = keys(name).transpose(1, 2)
        return k @ k.mT

    def distinct(name: str) -> int:
        return len({tuple(row) for row in keys(name)[0, :, 0].tolist()})

    assert cosines("identical").min() > 1 - 1e-14
    assert 1e-6 < 1 - cosines("near-identical").min() < 1e-3
    assert 0.7 < cosines("positive").mean() < 0.8 and cosines("positive").min() > 0
    assert cosines("two clusters")[..., ::2, ::2].min() > 0.999 and cosines("two clusters")[..., 0, 1].abs().max() < 0.9
    assert torch.linalg.matrix_rank(keys("rank 4")[0, :, 0]) == 4
    assert distinct("vocabulary") == 8 and distinct("one-hot") == 16
    first = cosines("orthonormal")[..., :16, :16]
    assert (first - torch.eye(16, dtype=torch.float64)).abs().max() < 1e-14


@pytest.mark.parametrize("name", inputs.GATES)
@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_gates_are_never_positive_and_fit_the_rule(name, rule):
    g = draw("random", rule, SHAPE, gate=name)["g"]
    assert (g <= 0).all() and g.ndim == (3 if rule == "gated_delta_rule" else 4)


def test_gates_have_the_values_of_their_names():
    def infinite(name: str) -> list[int]:
        g = draw("random", "kda", SHAPE, gate=name)["g"]
        at = g.isinf().flatten(2)
        assert torch.equal(at.any(-1), at.all(-1)) and torch.equal(at[0], at[1])
        return at[0, :, 0].nonzero().flatten().tolist()

    assert infinite("reset one") == [65]
    assert infinite("reset first") == [0, 64, 128] and infinite("reset last") == [63, 127, 129]
    assert infinite("alternating") == list(range(1, 130, 2)) and len(infinite("reset all")) == 130
    dead = draw("random", "kda", SHAPE, gate="dead channel")["g"]
    assert (dead[..., 0] == -1e6).all() and (dead[..., 1:] > -1).all()
    spikes = (draw("random", "kda", SHAPE, gate="spiky")["g"] < -19).float().mean()
    assert 0.02 < spikes < 0.05
    bound = draw("random", "kda", SHAPE, gate="bound reached")["g"]
    assert bound.min() == -5 and 0.25 < (bound == -5).float().mean() < 0.4


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_a_model_starts_with_the_decays_of_its_paper(rule):
    arguments = draw("random", rule, SHAPE, gate="model", dtype=torch.float64)
    assert arguments["use_gate_in_kernel"] and "lower_bound" not in arguments
    step = torch.nn.functional.softplus(arguments["dt_bias"])
    rate = arguments["A_log"].exp()
    assert step.min() > 1e-3 - 1e-9 and step.max() < 0.1 + 1e-9 and rate.min() >= 1 and rate.max() <= 16


def test_arguments_that_need_a_flag_set_it():
    assert draw("random", "delta_rule", SHAPE, beta="logits")["use_beta_sigmoid_in_kernel"]
    assert draw("random", "kda", SHAPE, gate="model bounded")["lower_bound"] == -5.0


def test_converged_values_are_linear_in_the_keys():
    arguments = draw("converged", "delta_rule", SHAPE, dtype=torch.float64)
    k, v = arguments["k"][0, :, 0], arguments["v"][0, :, 1]
    solution = torch.linalg.lstsq(k, v, driver="gelsd").solution
    assert (k @ solution - v).abs().max() < 1e-12
    large = draw("random", "delta_rule", SHAPE, values="linear 4096", dtype=torch.float64)["v"]
    assert (torch.linalg.vector_norm(large, dim=-1) - 4096).abs().max() < 1e-9


def test_steps_of_ttt():
    def eta(name: str) -> Tensor:
        return draw("random", "ttt_linear", SHAPE, eta=name)["eta"][0, :, 0, 0]

    assert not eta("zero").any() and eta("last zero")[-1] == 0 and eta("last zero")[:-1].all()
    assert eta("one huge")[65] == 1e3 and (eta("one huge") > 1).sum() == 1


def test_incoming_gradients_are_reproducible_and_sized():
    result = torch.zeros(3, 4, dtype=torch.bfloat16)
    assert torch.equal(inputs.incoming(result), inputs.incoming(result))
    assert torch.equal(inputs.incoming(result, size=2.0**20), 2.0**20 * inputs.incoming(result))
    assert not torch.equal(inputs.incoming(result), inputs.incoming(result, seed=1))


def test_unknown_names_are_refused():
    for names in ({"family": "usual"}, {"keys": "long"}, {"gate": "open"}, {"beta": "three"}, {"state": "full"}):
        with pytest.raises(KeyError):
            draw(**names)


def test_packings_end_inside_their_buffer():
    for packing in [*PACKINGS.values(), *every_offset(16)]:
        lengths = packing.lengths()
        assert min(lengths, default=0) >= 0 and sum(lengths) == packing.cu_seqlens[-1] <= packing.tokens
    assert [p.cu_seqlens[1] % 16 for p in every_offset(16)] == [*range(1, 16), 0]
    assert math.gcd(*WIDTHS, *CHUNK_SIZES) == 8
