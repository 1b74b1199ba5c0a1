"""RWKV-7's layer against its formula, its published initial values, and its place in a decoder."""

import math

import pytest
import torch
from torch.nn import functional as F

from wyfold import SequenceLayout, reference
from wyfold.layers import RWKV7TimeMix
from wyfold.models import Decoder, DecoderConfig

WIDTH, H, K, V = 24, 2, 16, 8


def perturbed(number: int, **options) -> RWKV7TimeMix:
    layer = RWKV7TimeMix(WIDTH, H, K, V, decay_rank=4, layer_idx=number, num_layers=3, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return layer


def formula(layer, x, first_value, lengths):
    """The paper's equations, one sequence after another."""
    p = dict(layer.named_parameters())

    def low_rank(name, x, activation=lambda x: x):
        inner = activation(x @ p[f"{name}_lora.lora.0.weight"].T) @ p[f"{name}_lora.lora.2.weight"].T
        return inner + p.get(f"{name}_lora.lora.2.bias", 0.0)

    found, start = [], 0
    for length in lengths:
        tokens = x[:, start : start + length]
        before = F.pad(tokens, (0, 0, 1, 0))[:, :-1]
        mixed = {c: tokens + (before - tokens) * p[f"x_{c}"] for c in "rwkvag"}
        r, k, v = (mixed[c] @ p[f"{c}_proj.weight"].T for c in "rkv")
        if first_value is not None:
            v = v + (first_value[:, start : start + length] - v) * torch.sigmoid(low_rank("v", mixed["v"]))
        w = -torch.exp(torch.tensor(-0.5, dtype=x.dtype)) * torch.sigmoid(low_rank("w", mixed["w"], torch.tanh))
        a, g = torch.sigmoid(low_rank("a", mixed["a"])), low_rank("g", mixed["g"], torch.sigmoid)
        kk = F.normalize((k * p["k_k"]).unflatten(-1, (H, K)), dim=-1)
        k = k * (1 + (a - 1) * p["k_a"])
        r, w, k, v, a = (rows.unflatten(-1, (H, -1)) for rows in (r, w, k, v, a))
        o, _ = reference.rwkv7(r, w, k, v, -kk, kk * a * (1 + w.exp() if layer.allow_neg_eigval else 1))
        mean = o.mean(-1, keepdim=True)
        variance = (o - mean).square().mean(-1, keepdim=True)
        o = ((o - mean) / (variance + K * 1e-5).sqrt()).flatten(2) * p["g_norm.weight"] + p["g_norm.bias"]
        o = o + ((r * k * p["r_k"]).sum(-1, keepdim=True) * v).flatten(2)
        found.append((o * g) @ p["o_proj.weight"].T)
        start += length
    return torch.cat(found, 1)


@pytest.mark.parametrize(("number", "signed"), [(0, True), (2, False)])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_output_and_gradients(number, signed, packed, float64_bounds, same_gradients):
    """Also the gradient of the first layer's values, and no token shift across a boundary."""
    layer, lengths = perturbed(number, allow_neg_eigval=signed), [17, 0, 1, 21] if packed else [39]
    x = torch.randn(1 if packed else 2, 39, WIDTH, dtype=torch.float64, requires_grad=True)
    first_value = torch.randn(*x.shape[:2], H * V, dtype=torch.float64, requires_grad=True) if number else None
    layout = SequenceLayout.from_lengths(lengths) if packed else None
    y, truth = layer(x, layout=layout, first_value=first_value), formula(layer, x, first_value, lengths)
    float64_bounds.output("y", y, truth)
    same_gradients(layer, x, y, truth)
    if first_value is not None:
        arrow = torch.randn_like(truth)
        mine, true = (torch.autograd.grad(rows, first_value, arrow, retain_graph=True)[0] for rows in (y, truth))
        float64_bounds.gradient("first_value", mine, true)


def test_eigenvalues_of_transitions():
    """Largest rates, by large biases: -1 is reached with `allow_neg_eigval` and a slow decay, never passed."""
    for signed, lowest in ((True, -1.0), (False, math.exp(-math.exp(-0.5)) - 1)):
        layer = perturbed(0, allow_neg_eigval=signed)
        with torch.no_grad():
            layer.a_lora.lora[2].bias.fill_(50)
            layer.w_lora.lora[2].bias.copy_(torch.linspace(-50, 50, H * K))
            x = torch.randn(1, 30, WIDTH, dtype=torch.float64)
            rows = layer._rows(x, None, torch.zeros_like(x))
            transitions = torch.diag_embed(rows.w.exp()) + rows.b[..., None] * rows.a[..., None, :]
            found = torch.linalg.eigvals(transitions)
        rounding = 64 * torch.finfo(torch.float64).eps
        assert not (found.imag.abs() > rounding).any()
        assert abs(found.real.min() - lowest) < 1 / 16 and found.real.min() > lowest - rounding
        assert found.real.max() < 1 + rounding


def test_the_first_layers_value_is_returned():
    first, later = perturbed(0), perturbed(1)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    y, value = first(x, return_value=True)
    assert torch.equal(y, first(x)) and value.shape == (2, 5, H * V)
    assert later(x, first_value=value, return_value=True)[1] is value


def test_flas_parameters_load():
    """Names and shapes as in fla's layer, with the default inner widths."""
    layer = RWKV7TimeMix(24, 3, 8, layer_idx=1, num_layers=2)
    low_rank = dict.fromkeys(("w", "a", "v", "g"), (32, 24))
    expected = {
        **{f"x_{c}": (1, 1, 24) for c in "rwkvag"}, "k_k": (24,), "k_a": (24,), "r_k": (3, 8),
        **{f"{c}_proj.weight": (24, 24) for c in "rkvo"}, "g_norm.weight": (24,), "g_norm.bias": (24,),
        **{f"{c}_lora.lora.0.weight": shape for c, shape in low_rank.items()},
        **{f"{c}_lora.lora.2.weight": shape[::-1] for c, shape in low_rank.items()},
        **{f"{c}_lora.lora.2.bias": (24,) for c in "wav"},
    }  # fmt: skip
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == expected
    first = {name for name in expected if not name.startswith("v_lora")}
    assert RWKV7TimeMix(24, 3, 8).state_dict().keys() == first


@pytest.mark.parametrize(
    ("width", "head_dim", "ranks"), [(768, 64, [64, 64, 32, 128]), (4096, 128, [320, 320, 224, 320])]
)
def test_inner_widths_grow_with_the_layer(width, head_dim, ranks):
    with torch.device("meta"):
        layer = RWKV7TimeMix(width, width // head_dim, head_dim, layer_idx=1)
    assert [getattr(layer, f"{c}_lora").lora[0].weight.shape[0] for c in "wavg"] == ranks


def test_initial_values():
    """Channel by channel: the factors of the token shift, the biases of the low-rank projections, the norm."""
    layer = RWKV7TimeMix(32, 4, 8, layer_idx=2, num_layers=5)
    truth: dict[str, list[float]] = {}
    for n in range(32):
        zigzag = (n % 8 - 3.5) / 3.5
        zigzag *= abs(zigzag)
        ramp = n / 31 - 0.5
        powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
        values = {f"x_{c}": 1 - (n / 32) ** (power * 0.6) for c, power in powers.items()}
        values["w_lora.lora.2.bias"] = -6 + 6 * (n / 31) ** (1 + 0.5**0.3) + 0.5 + 2.5 * zigzag
        values["a_lora.lora.2.bias"] = -0.19 + 0.3 * zigzag + 0.4 * ramp
        values["v_lora.lora.2.bias"] = 0.73 - 0.4 * ramp
        values |= {"k_k": 0.71 - 0.1 * ramp, "k_a": 1.02, "r_k": -0.04, "g_norm.weight": 0.6**0.7, "g_norm.bias": 0.0}
        for name, value in values.items():
            truth.setdefault(name, []).append(value)
    for name, numbers in truth.items():
        assert torch.equal(layer.get_parameter(name).flatten(), torch.tensor(numbers)), name
    drawn = {name: x for name, x in layer.named_parameters() if name.endswith("lora.0.weight")}
    assert len(drawn) == 4 and not any(x.any() for x in drawn.values())


@pytest.fixture
def model() -> Decoder:
    """A decoder in which the second and the fourth layer are RWKV-7's."""
    config = DecoderConfig(hidden_size=32, num_layers=4, pattern="gla rwkv7", num_heads=2, head_dim=16)
    model = Decoder(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def test_a_decoder_passes_the_first_layers_value_on(model):
    assert [block.mixer.v_lora is not None for block in model.blocks[1::2]] == [False, True]
    assert [block.mixer.num_layers for block in model.blocks[1::2]] == [2, 2]
    ids, seen = torch.randint(256, (2, 9)), []
    model.blocks[1].mixer.register_forward_hook(lambda module, given, result: seen.append(result[1]))
    model.blocks[3].mixer.register_forward_pre_hook(
        lambda module, given, named: seen.append(named["first_value"]), with_kwargs=True
    )
    model(ids, ids)[1].backward()
    assert seen[0] is seen[1]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_decoder_generates_saves_and_packs(model, tmp_path, float64_bounds):
    ids = torch.randint(256, (1, 12))
    with torch.no_grad():
        whole, _ = model(ids)
        cache = model.new_cache(1)
        pieces = [model(part, cache=cache)[0] for part in ids.split([5, 1, 6], 1)]
        float64_bounds.output("logits", torch.cat(pieces, 1), whole)
        packed, _ = model(ids, layout=SequenceLayout.from_lengths([5, 7]))
        float64_bounds.output("logits", packed[:, 5:], model(ids[:, 5:])[0])
        generated = model.generate(ids, 4, temperature=0.0)
        for _ in range(4):
            ids = torch.cat([ids, model(ids)[0][:, -1:].argmax(-1)], 1)
    assert torch.equal(generated, ids)
    model.save(tmp_path)
    assert torch.equal(Decoder.load(tmp_path)(ids)[0], model(ids)[0])


@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_a_recomputed_decoder_has_the_same_gradients(model, what):
    ids, found = torch.randint(256, (2, 9)), []
    for setting in (None, what):
        model.recompute(setting)
        model.zero_grad()
        model(ids, ids)[1].backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("first_value", [True, False])
def test_autocast_and_16_bits(first_value):
    layer = RWKV7TimeMix(32, 2, 16, layer_idx=int(first_value))
    value = torch.randn(1, 5, 32) if first_value else None
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(1, 5, 32), first_value=value)
    assert y.dtype == torch.bfloat16 and y.isfinite().all()
    layer.bfloat16()
    assert layer(torch.randn(1, 5, 32).bfloat16(), first_value=value).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_idx": 2, "num_layers": 2}, "layer_idx must be below num_layers = 2, got 2"),
        ({"layer_idx": -1}, "layer_idx must be at least 0, got -1"),
        ({"decay_rank": 0}, "decay_rank must be at least 1, got 0"),
        ({"head_dim": 300}, "head_dim must have width K from 1 to 256, got 300"),
        ({"backend": "cuda"}, "backend must be one of None, 'eager', .*, got 'cuda'"),
    ],
)
def test_errors_name_the_argument(change, message):
    with pytest.raises(ValueError, match=f"^RWKV7TimeMix: {message}"):
        RWKV7TimeMix(**{"hidden_size": 32, "num_heads": 2} | change)


def test_a_value_that_does_not_belong_to_the_layer_is_refused():
    first, later, x = perturbed(0), perturbed(1), torch.randn(1, 3, WIDTH, dtype=torch.float64)
    value = torch.randn(1, 3, H * V, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"first_value must be None in the first layer, got a tensor in layer 0$"):
        first(x, first_value=value)
    with pytest.raises(ValueError, match=r"first_value must be the values of the first layer, got None in layer 1$"):
        later(x)
    with pytest.raises(ValueError, match=r"^RWKV7TimeMix: first_value must be \[B, T, 16\]"):
        later(x, first_value=value[..., 1:])
    with pytest.raises(ValueError, match=r"options\['rwkv7'\] must be among .*, got 'layer_idx'"):
        DecoderConfig(pattern="rwkv7", options={"rwkv7": {"layer_idx": 1}})
