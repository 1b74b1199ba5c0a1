"""The decoder: logits, loss, gradients, caches and pools."""

import dataclasses

import pytest
import torch
from tests.models.conftest import SMALL
from torch.nn import functional as F

from wyfold import SequenceLayout, UnsupportedError
from wyfold.models import Decoder, DecoderConfig


def test_token_by_token_equals_one_call(model, ids, float64_bounds):
    cache = model.new_cache(2)
    steps = [model(token, cache=cache)[0] for token in ids.split(1, dim=1)]
    float64_bounds.output("logits", torch.cat(steps, dim=1), model(ids)[0])


def test_packed_equals_separate_calls(model, float64_bounds):
    lengths = [9, 0, 17, 1]
    ids = torch.randint(256, (1, 30))
    logits, _ = model(ids, layout=SequenceLayout.from_lengths(lengths, tokens=30))
    documents = [document for document in ids.split([*lengths, 3], dim=1)[:-1] if document.shape[1] > 0]
    separate = torch.cat([model(document)[0] for document in documents], dim=1)
    float64_bounds.output("logits", logits[:, :27], separate)


def test_packed_prompts_continue_as_a_batch(model, float64_bounds):
    prompts = [torch.randint(256, (1, n)) for n in (3, 20)]
    cache = model.new_cache(2)
    model(torch.cat(prompts, dim=1), layout=SequenceLayout.from_lengths([3, 20]), cache=cache)
    following = torch.randint(256, (2, 4))
    together = torch.cat([model(token, cache=cache)[0] for token in following.split(1, dim=1)], dim=1)
    alone = [model(torch.cat([p, following[i : i + 1]], dim=1))[0][:, -4:] for i, p in enumerate(prompts)]
    float64_bounds.output("logits", together, torch.cat(alone))


def test_the_loss_is_the_mean_over_labels_that_count(model, ids, float64_bounds):
    labels = torch.randint(256, ids.shape)
    labels[0, 5:20] = -100
    logits, loss = model(ids, labels)
    log_p = logits.log_softmax(-1)
    truth = -torch.stack([log_p[b, t, labels[b, t]] for b in range(2) for t in range(37) if labels[b, t] >= 0]).mean()
    float64_bounds.output("loss", loss, truth)
    assert model(ids)[1] is None


def test_logits_of_some_places_equal_those_of_all(model, ids, float64_bounds):
    """For few labels: the same loss and gradients from their logits only."""
    places = torch.tensor([[3, 4, 36], [0, 20, 21]])
    labels = torch.randint(256, places.shape)
    few, loss = model(ids, labels, places=places)
    logits, whole = model(ids, torch.full_like(ids, -100).scatter_(1, places, labels))
    float64_bounds.output("logits", few, torch.stack([row[at] for row, at in zip(logits, places)]))
    float64_bounds.output("loss", loss, whole)
    same_gradients(model, loss, whole, float64_bounds)
    assert model(ids, places=places)[1] is None


def test_places_of_a_packed_row_leave_out_labels_beyond_its_end(model, ids, float64_bounds):
    layout = SequenceLayout.from_lengths([9, 20], tokens=37)
    places = torch.tensor([[8, 28, 30]])
    few, loss = model(ids[:1], ids[:1, :3], layout=layout, places=places)
    logits, _ = model(ids[:1], layout=layout)
    float64_bounds.output("logits", few, logits[:, places[0]])
    truth = torch.nn.functional.cross_entropy(few[0, :2].float(), ids[0, :2])
    float64_bounds.within("loss", loss.double(), truth.double(), 1e-6)


def test_without_valid_labels_the_loss_is_zero(model, ids):
    _, loss = model(ids, torch.full_like(ids, -100))
    loss.backward()
    assert loss.item() == 0
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_labels_past_the_last_boundary_never_count(model):
    ids, labels = torch.randint(256, (2, 1, 30))
    layout = SequenceLayout.from_lengths([9, 17], tokens=30)
    ignored = labels.clone()
    ignored[:, 26:] = -100
    assert torch.equal(model(ids, labels, layout=layout)[1], model(ids, ignored, layout=layout)[1])


def test_the_loss_of_a_16_bit_model_is_float32(config, ids):
    logits, loss = Decoder(config).bfloat16()(ids, ids)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    total = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten(), reduction="sum")
    assert torch.equal(loss, total / ids.numel())


def test_every_parameter_learns(model, ids):
    _, loss = model(ids, ids.roll(-1, dims=1))
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def same_gradients(model, got, truth, float64_bounds):
    """Check that two results have equal, nonzero gradients with respect to every parameter."""
    arrow = torch.randn_like(truth)
    parameters = dict(model.named_parameters())
    mine, true = (torch.autograd.grad(y, parameters.values(), arrow, retain_graph=True) for y in (got, truth))
    for name, ours, expected in zip(parameters, mine, true, strict=True):
        assert expected.abs().max() > 0, f"{name}: a gradient of zero shows nothing"
        float64_bounds.gradient(name, ours, expected)


def test_every_gradient_of_packed_equals_separate_calls(model, float64_bounds):
    lengths = [9, 0, 17, 1]
    ids = torch.randint(256, (1, 30))
    logits, _ = model(ids, layout=SequenceLayout.from_lengths(lengths, tokens=30))
    documents = [document for document in ids.split([*lengths, 3], dim=1)[:-1] if document.shape[1] > 0]
    separate = torch.cat([model(document)[0] for document in documents], dim=1)
    same_gradients(model, logits[:, :27], separate, float64_bounds)


def test_gradients_pass_through_the_cache(model, ids, float64_bounds):
    """Split at whole mini-batches of TTT, because an open one is a constant to the backward."""
    cache = model.new_cache(2)
    pieces = [model(piece, cache=cache)[0] for piece in ids[:, :32].split(16, dim=1)]
    same_gradients(model, torch.cat(pieces, dim=1), model(ids[:, :32])[0], float64_bounds)


@pytest.mark.long
# Dynamo instantiates each traced autograd.Function, which PyTorch deprecates.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "packed", [pytest.param(False, id="dense"), pytest.param(True, id="packed", marks=pytest.mark.release)]
)
def test_one_graph_with_its_gradients(model, ids, packed, float64_bounds):
    """All mixers, the loss and the backward as one graph.

    Packed, a recurrence and attention; `layers/test_mixers.py` compiles packed rows of every mixer.
    """
    if packed:
        model.blocks = torch.nn.ModuleList([model.blocks[0], model.blocks[4]])
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    layout = SequenceLayout.from_lengths([9, 0, 17, 1], tokens=37) if packed else None
    ids = ids[:1] if packed else ids
    (got, loss), (truth, true_loss) = (run(ids, ids.roll(-1, dims=1), layout=layout) for run in (compiled, model))
    float64_bounds.output("logits", got, truth)
    float64_bounds.output("loss", loss, true_loss)
    same_gradients(model, loss, true_loss, float64_bounds)


def test_a_step_of_decoding_is_one_graph(model, ids, float64_bounds):
    """An eager prefill, then decoding steps of one compiled graph that updates the cache."""
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        cache = model.new_cache(2)
        model(ids[:, :20], cache=cache)
        plain = cache.snapshot()
        for token in ids[:, 20:23].split(1, dim=1):
            float64_bounds.output("logits", compiled(token, cache=cache)[0], model(token, cache=plain)[0])
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            float64_bounds.output(name, ours[name].double(), theirs[name].double())


def test_every_parameter_gradient_is_the_slope_of_the_loss(model, ids):
    """Compare with a central difference along one random direction per parameter."""
    labels = ids.roll(-1, dims=1)
    model(ids, labels)[1].backward()
    step = 1e-5
    for name, parameter in model.named_parameters():
        direction = F.normalize(torch.randn_like(parameter).flatten(), dim=0).view_as(parameter)
        with torch.no_grad():
            losses = []
            for sign in (1, -2):
                parameter += sign * step * direction
                losses.append(model(ids, labels)[1].item())
            parameter += step * direction
        slope = (losses[0] - losses[1]) / (2 * step)
        # Truncation of order step^2 and rounding of order 1e-16 / step, of a loss near 6.
        assert abs((parameter.grad * direction).sum().item() - slope) < 1e-8 + 1e-6 * abs(slope), name


def test_without_gradients_the_same_bits(config, ids):
    model = Decoder(config)
    logits, loss = model(ids, ids)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            again = model(ids, ids)
        assert torch.equal(logits, again[0]) and torch.equal(loss, again[1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cache_fills_the_same_without_gradients(config, ids, mode):
    """A prompt, one token, more tokens: logits and every cached tensor."""

    def decoded(cache):
        return [model(piece, cache=cache)[0] for piece in ids.split([20, 1, 16], dim=1)]

    model = Decoder(config)
    assert all(parameter.requires_grad for parameter in model.parameters())
    loud, cache = model.new_cache(2), model.new_cache(2)
    with_gradients = decoded(loud)
    with mode():
        without = decoded(cache)
    assert all(map(torch.equal, without, with_gradients))
    assert all(x.requires_grad for x in with_gradients) and not any(x.requires_grad for x in without)
    for layer, loud_layer in zip(cache.layers, loud.layers, strict=True):
        assert layer.keys() == loud_layer.keys()
        for name, x in layer.items():
            assert torch.equal(x, loud_layer[name]) and not x.requires_grad, name


def test_tied_and_untied():
    tied = Decoder(DecoderConfig(**SMALL))
    untied = Decoder(DecoderConfig(**SMALL, tied=False))
    assert set(untied.state_dict()) - set(tied.state_dict()) == {"head.weight"}
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with torch.no_grad():
        untied.head.weight.zero_()
    assert not untied(ids)[0].any() and tied(ids)[0].any()


def test_initial_weights_shrink_with_depth():
    deviation = {}
    for depth in (2, 8):
        model = Decoder(DecoderConfig(**SMALL | {"hidden_size": 128, "head_dim": 64, "num_layers": depth}))
        deviation[depth] = [model.blocks[0].mixer.out.weight.std().item(), model.blocks[1].mlp.out.weight.std().item()]
        assert 0.019 < model.blocks[0].mixer.qkv.weight.std().item() < 0.021
        assert 0.019 < model.embedding.weight.std().item() < 0.021
    for shallow, deep in zip(*deviation.values(), strict=True):
        assert 0.0095 < shallow < 0.0105 and 1.9 < shallow / deep < 2.1


def test_errors_name_the_argument(model, ids):
    layout = SequenceLayout.from_lengths([10])
    for arguments, message in [
        (([1, 2],), "Decoder: ids must be a torch.Tensor, got list"),
        ((ids[0],), r"Decoder: ids must have 2 dimensions, \[B, T\], got \[37\]"),
        ((ids.clone().fill_(-1),), r"Decoder: ids must be in \[0, \d+\), got -1"),
        ((ids.clone().fill_(10**6).int(),), r"Decoder: ids must be in \[0, \d+\), got 1000000"),
        ((ids.float(),), "Decoder: ids must be int32 or int64, got float32"),
        ((ids.short(),), "Decoder: ids must be int32 or int64, got int16"),
        ((ids.to("meta"),), "Decoder: ids must be on cpu, as the embedding is, got meta"),
        ((ids, ids.long().to("meta")), "Decoder: labels must have the device of ids, cpu, got meta"),
        ((ids, ids[:, 1:]), r"Decoder: labels must be \[B, T\] = \[2, 37\], got \[2, 36\]"),
        ((ids, ids.int()), "Decoder: labels must be int64, got int32"),
        ((ids, ids.tolist()), "Decoder: labels must be a torch.Tensor, got list"),
        ((ids, ids.clone().fill_(10**6)), r"Decoder: labels must be in \[0, \d+\) or -100, got 1000000"),
        ((ids, ids.clone().fill_(-1)), r"Decoder: labels must be in \[0, \d+\) or -100, got -1"),
    ]:
        with pytest.raises((ValueError, TypeError), match=f"^{message}$"):
            model(*arguments)
    for keywords, message in [
        ({"layout": layout}, r"Decoder: ids must be \[1, T\] = \[1, 10\] for its layout, got \[2, 37\]"),
        ({"layout": layout.cu_seqlens}, "Decoder: layout must be a SequenceLayout or None, got Tensor"),
        ({"places": ids[:1]}, r"Decoder: places must be \[B, n\], B = 2, got \[1, 37\]"),
        ({"places": ids[0]}, r"Decoder: places must be \[B, n\], B = 2, got \[37\]"),
        ({"places": ids[:, :2].clone().fill_(37)}, r"Decoder: places must be in \[0, 37\), got 37"),
        ({"places": ids.int()}, "Decoder: places must be int64, got int32"),
        ({"places": ids[:, :2] % 37, "labels": ids}, r"Decoder: labels must be \[B, n\] = \[2, 2\], got \[2, 37\]"),
        ({"cache": model.new_cache(3)}, "Decoder: cache must hold the 2 sequences of ids, got 3"),
        ({"cache": [{}] * 5}, "Decoder: cache must be a DecodingCache, a PooledCache or None, got list"),
    ]:
        with pytest.raises((ValueError, TypeError), match=f"^{message}$"):
            model(ids, **keywords)
    other = Decoder(DecoderConfig(**SMALL | {"num_layers": 2})).new_cache(2)
    with pytest.raises(ValueError, match=r"^Decoder: cache must have 5 layers, got 2$"):
        model(ids, cache=other)
    with pytest.raises(TypeError, match=r"^Decoder: config must be a DecoderConfig, got dict$"):
        Decoder(SMALL)


def test_the_backend_of_an_instance_reaches_every_operator(config, ids, tmp_path, planned_as_cuda):
    model = Decoder(config, backend="eager")
    model(ids, ids)[1].backward()
    model.generate(ids, 3)
    assert "backend" not in model.config.to_json()
    model.save(tmp_path)
    Decoder.load(tmp_path, backend="eager")(ids)
    rules = {operator for operator, _ in planned_as_cuda} - {"causal_conv1d", "rms_norm_gated"}
    chunked = ("chunk_gated_delta_rule", "chunk_kda", "chunk_ttt_linear", "chunk_delta_rule")
    assert rules == {*chunked, *(rule.replace("chunk", "fused_recurrent") for rule in chunked)}
    assert {backend for _, backend in planned_as_cuda} == {"eager"}
    for unasked in (Decoder(config), Decoder.load(tmp_path)):
        with pytest.raises(UnsupportedError, match="an argument of every operator and of the layer or decoder"):
            unasked(ids)


def test_the_backend_is_not_part_of_the_configuration(config):
    with pytest.raises(ValueError, match=r"^DecoderConfig: options\['kda'\] must be among .*, got 'backend'"):
        dataclasses.replace(config, options={"kda": {"backend": "eager"}})
    with pytest.raises(ValueError, match=r"^Decoder: backend must be one of None, 'eager', .*, got 'cuda'"):
        Decoder(config, backend="cuda")


@torch.no_grad()
def test_pools_hold_what_a_cache_holds():
    """Prompts of any lengths and single tokens, in slots of any order, with other sequences in the pool."""
    config = DecoderConfig(hidden_size=16, num_layers=3, pattern="gdn kda delta_net", num_heads=2, head_dim=8)
    model, lengths = Decoder(config), [5, 0, 33]
    layout, ids = SequenceLayout.from_lengths(lengths), torch.randint(256, (1, 38))
    cache, pools = model.new_cache(3), model.new_pools(7)
    before = pools.nbytes
    for pool in pools.layers:
        pool.conv.fill_(torch.nan), pool.state.fill_(torch.nan)
    slots, fresh = torch.tensor([4, 1, 6]), torch.zeros(3, dtype=torch.bool)
    expected, _ = model(ids, layout=layout, cache=cache)
    got, _ = model(ids, layout=layout, cache=pools.at(slots, fresh))
    assert torch.equal(got, expected)
    for _ in range(3):
        token = torch.randint(256, (3, 1))
        expected, _ = model(token, cache=cache)
        got, _ = model(token, cache=pools.at(slots))
        assert torch.equal(got, expected)
    for layer, pool in zip(cache.layers, pools.layers, strict=True):
        assert torch.equal(pool.state[slots].mT, layer["state"]) and torch.equal(pool.conv[slots], layer["conv"])
        assert pool.state[[0, 2, 3, 5]].isnan().all() and pool.conv[[0, 2, 3, 5]].isnan().all()
    assert pools.nbytes == before


def test_pools_are_for_the_delta_family_and_without_a_gradient(model):
    with pytest.raises(ValueError, match=r"Decoder.new_pools: pattern must hold layers of the delta family alone, got"):
        model.new_pools(3)
    own = Decoder(DecoderConfig(hidden_size=16, num_layers=1, pattern="gdn", num_heads=2, head_dim=8))
    with pytest.raises(ValueError, match="must not require a gradient"):
        own(torch.zeros(1, 1, dtype=torch.int64), cache=own.new_pools(1).at())
