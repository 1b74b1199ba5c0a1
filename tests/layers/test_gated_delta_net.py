"""Gated DeltaNet against its formula, and the initial decays."""

import pytest
import torch
from tests.context_parallel.ranks import Case, failures_on_ranks
from torch.nn.functional import silu, softplus

from wyfold import SequenceLayout, reference
from wyfold.layers import DecayParameters, GatedDeltaNet
from wyfold.models import Decoder, DecoderConfig
from wyfold.reference import error


@pytest.fixture
def formula(projected):
    def formula(layer, x, layout=None):
        q, k, v = projected(layer, x, layout)
        beta = torch.sigmoid(x @ layer.beta.weight.T)
        decay = layer.decay_parameters
        g = -decay.A_log.exp() * softplus(x @ layer.decay.weight.T + decay.dt_bias)
        o, _ = reference.gated_delta_rule(reference.l2norm(q), reference.l2norm(k), v, g, beta, cu_seqlens=layout)
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer.norm.eps) * layer.norm.weight
        gate = silu(x @ layer.gate.weight.T)
        return (o.flatten(2) * gate) @ layer.out.weight.T

    return formula


@pytest.mark.parametrize("layout", [None, SequenceLayout.from_lengths([17, 0, 20], tokens=39)], ids=["dense", "packed"])
def test_output_and_gradients(build, formula, layout, float64_bounds, same_gradients):
    layer = build("gated_delta_net")
    x = torch.randn(1 if layout else 2, 39, 24, dtype=torch.float64, requires_grad=True)
    y, truth = layer(x, layout=layout), formula(layer, x, layout)
    float64_bounds.output("y", y, truth)
    same_gradients(layer, x, y, truth)


def test_state_dict_names_are_stable():
    assert sorted(GatedDeltaNet(16, 1, head_dim=16).state_dict()) == [
        "beta.weight",
        "conv.weight",
        "decay.weight",
        "decay_parameters.A_log",
        "decay_parameters.dt_bias",
        "gate.weight",
        "norm.weight",
        "out.weight",
        "qkv.weight",
    ]


@pytest.mark.parametrize("channels", [None, 64])
def test_initial_decays_are_those_of_the_papers(channels):
    decay = DecayParameters(512, channels)
    rate, step = decay.A_log.exp(), softplus(decay.dt_bias)
    assert rate.shape == (512,) and step.shape == ((512,) if channels is None else (512, 64))
    assert 1 <= rate.min() < 2 and 15 < rate.max() <= 16.001
    assert 0.00099 < step.min() < 0.0012 and 0.08 < step.max() < 0.1001
    # Log-uniform: the median is the geometric mean of the ends.
    assert 0.007 < step.median() < 0.0145


def test_a_bounded_gate_is_initially_unsaturated():
    decay = DecayParameters(64, 16, bounded=True)
    assert not decay.A_log.any()
    start = torch.sigmoid(decay.A_log.exp()[:, None] * decay.dt_bias)
    assert 0.0009 < start.min() and start.max() < 0.1


def test_decay_parameters_are_accessed_through_a_forward(build):
    """FSDP2 gathers and casts a module's parameters around its forward, so they must not be accessed otherwise."""
    layer = build("gated_delta_net")
    calls = []
    layer.decay_parameters.register_forward_hook(lambda module, arguments, result: calls.append(len(result)))
    layer(torch.randn(1, 3, 24, dtype=torch.float64))
    assert calls == [2]


def test_decay_parameters_may_stay_float32_in_a_16_bit_layer(build, formula):
    layer = build("gated_delta_net", torch.float32).bfloat16()
    layer.decay_parameters.float()
    x = torch.randn(1, 20, 24, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and layer.decay_parameters.A_log.grad.dtype == torch.float32
    yardstick = formula(layer, x).bfloat16()
    error.require(error.judge(y, formula(layer.double(), x.double()), yardstick, name="y"))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_from_hf_is_the_same_layer(family, float64_bounds, transformers):
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes = heads | {"linear_key_head_dim": 16, "linear_value_head_dim": 8, "hidden_size": 24, "num_hidden_layers": 1}
    if family == "qwen3_next":
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet as Theirs

        config = transformers.Qwen3NextConfig(**sizes, rms_norm_eps=1e-5)
    else:
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet as Theirs

        config = transformers.Qwen3_5TextConfig(**sizes, rms_norm_eps=1e-5)
    theirs = Theirs(config, 0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    ours = GatedDeltaNet.from_hf(theirs, backend="eager")
    assert ours.backend == ours.conv.backend == ours.norm.backend == "eager"
    assert ours.norm.eps == 1e-5 and ours.norm.round_before_weight
    x = torch.randn(2, 21, 24)
    # The stock layer always computes in float32: the tolerance allows for 21 tokens of rounding.
    float64_bounds.within("y", ours(x).double(), theirs(x).double(), 2e-6)


def test_from_hf_refuses_other_layers():
    with pytest.raises(ValueError, match=r"^GatedDeltaNet.from_hf: layer must have Qwen's projections, got Linear$"):
        GatedDeltaNet.from_hf(torch.nn.Linear(3, 3))


# --- FSDP2 -----------------------------------------------------------------------------------------------------------


def decoder():
    torch.manual_seed(0)
    return Decoder(DecoderConfig(hidden_size=32, num_layers=2, pattern="gdn kda", num_heads=2, head_dim=16))


def learned(model):
    ids = torch.arange(40)[None] * 37 % 256
    _, loss = model(ids, ids)
    loss.backward()
    wide = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in model.named_parameters()}
    return loss.detach(), {name: grad for name, grad in wide.items() if "decay_parameters" in name}


def sharded_apart(given, group):
    """All in bfloat16 except the decay parameters, whose separate forward FSDP surrounds with gather and free."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    loss, gradients = given
    mesh, seen = init_device_mesh("cpu", (group.size(),)), []
    for low in (False, True):
        model = decoder()
        seen.clear()
        own = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None)}
        for part in model.modules():
            if isinstance(part, DecayParameters):
                fully_shard(part, mesh=mesh)
                part.register_forward_hook(lambda module, given, made: seen.extend(x.dtype for x in made))
        for part in (*model.blocks, model):
            fully_shard(part, **own)
        ours, found = learned(model)
        assert seen == [torch.float32] * 4
        assert found.keys() == gradients.keys() and len(found) == 4
        if low:
            assert abs(ours - loss) < 0.01 * loss
            assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in found.values())
        else:  # the mean over two ranks with the same input
            assert torch.equal(ours, loss) and all(torch.equal(found[name], grad) for name, grad in gradients.items())


APART = {"decays in float32": Case(lambda: learned(decoder()), sharded_apart)}


@pytest.mark.long
def test_separately_sharded_decays_stay_in_float32(tmp_path):
    assert not failures_on_ranks([2], tmp_path, __name__, "APART")
