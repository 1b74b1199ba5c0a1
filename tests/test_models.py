"""The decoder: its configuration, its loss, generation from its cache, and what it writes to disk."""

import dataclasses
import json
import sys

import pytest
import torch
from torch.nn import functional as F

from wyfold import SequenceLayout, UnsupportedError, models
from wyfold.models import Decoder, DecoderConfig
from wyfold.pipelines import delta as pipeline

SMALL = {
    "hidden_size": 24,
    "num_layers": 5,
    "pattern": "gdn kda ttt_linear delta_net attention",
    "num_heads": 2,
    "head_dim": 8,
    "options": {"attention": {"window": 6}, "kda": {"lower_bound": -5.0}},
}


@pytest.fixture
def config() -> DecoderConfig:
    return DecoderConfig(**SMALL)


@pytest.fixture
def model(config) -> Decoder:
    """Every mixer once, float64, with matrices large enough for logits that differ."""
    model = Decoder(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(256, (2, 37))


# --- configuration ---------------------------------------------------------------------------------------------------


def test_a_pattern_is_repeated_to_depth():
    config = DecoderConfig(pattern="kda*3 attention", num_layers=6)
    assert config.layers == ("kda", "kda", "kda", "attention", "kda", "kda")
    assert DecoderConfig(pattern="gdn", num_layers=2).layers == ("gated_delta_net",) * 2


def test_a_configuration_survives_json(config):
    again = DecoderConfig.from_json(config.to_json())
    assert again == config and again.layers == config.layers
    assert DecoderConfig.from_json(DecoderConfig().to_json()) == DecoderConfig()


def test_options_reach_the_mixers_and_shared_fields_give_way(config):
    kda, attention = config.mixer("kda"), config.mixer("attention")
    assert (kda.lower_bound, kda.num_heads, attention.window) == (-5.0, 2, 6)
    config = DecoderConfig(options={"gdn": {"num_heads": 1, "num_v_heads": 6, "head_dim": 32, "conv_size": 2}})
    mixer = config.mixer("gated_delta_net")
    assert (mixer.num_heads, mixer.num_v_heads, mixer.head_dim, mixer.conv.weight.shape[1]) == (1, 6, 32, 2)
    assert config.mixer("kda").num_heads == 4


def test_a_configuration_owns_its_options():
    options = {"attention": {"window": 6}}
    config = DecoderConfig(options=options)
    options["attention"]["window"] = 7
    assert config.options == {"attention": {"window": 6}}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_heads = 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"hidden_size": 64.0}, "hidden_size must be an int, got float"),
        ({"num_layers": -1}, "num_layers must be at least 1, got -1"),
        ({"num_v_heads": 0}, "num_v_heads must be at least 1, got 0"),
        ({"mlp_size": "4x"}, "mlp_size must be an int, got str"),
        ({"tied": None}, "tied must be True or False, got None"),
        ({"norm_eps": float("nan")}, "norm_eps must be finite, got nan"),
        ({"pattern": ["kda"]}, "pattern must be a str, got list"),
        ({"pattern": " "}, "pattern must name at least one mixer, got ' '"),
        ({"pattern": "kda mamba"}, "pattern must name delta_net, .*, attention, gdn, got 'mamba'"),
        ({"pattern": "kda*0"}, r"pattern must have a count of at least 1 after a \*, got 'kda\*0'"),
        ({"pattern": "kda*x"}, r"pattern must have a count of at least 1 after a \*, got 'kda\*x'"),
        ({"options": "window"}, "options must map mixers to their options, got str"),
        ({"options": {"mamba": {}}}, "options must name .*, got 'mamba'"),
        ({"options": {"kda": 3}}, r"options\['kda'\] must map names to values, got int"),
        ({"options": {"kda": {"window": 3}}}, r"options\['kda'\] must be among num_heads, .*, got 'window'"),
        (
            {"options": {"kda": {"lower_bound": 1.0}}},
            r"options\['kda'\]\['lower_bound'\] must be below 0, got 1.0, in kda",
        ),
        (
            {"options": {"attention": {"window": 2.5}}, "pattern": "kda"},
            r"options\['attention'\]\['window'\] must be an int, got float, in attention",
        ),
        ({"num_v_heads": 3}, r"num_v_heads must be a multiple of num_heads = 4, got 3, in gated_delta_net"),
        ({"options": {"gdn": {"norm_eps": None}}}, r"options\['gated_delta_net'\]: eps must be a number, got .*"),
        ({"head_dim": 12}, r"head_dim .*, got 12, in gated_delta_net"),
        ({"options": {"kda": {"hidden_size": 3}}}, r"options\['kda'\] must be among num_heads, .*, got 'hidden_size'"),
    ],
)
def test_configuration_mistakes_are_named(fields, message):
    with pytest.raises((ValueError, TypeError), match=f"^DecoderConfig: {message}$"):
        DecoderConfig(**fields)


def test_json_mistakes_are_named():
    with pytest.raises(ValueError, match=r"must be known to this version, got colour, size$"):
        DecoderConfig.from_json(json.dumps({"size": 1, "colour": 2, "num_heads": 3}))
    with pytest.raises(ValueError, match=r"must be a JSON object, got list$"):
        DecoderConfig.from_json("[]")


# --- forward ---------------------------------------------------------------------------------------------------------


def test_token_by_token_is_the_whole(model, ids, float64_bounds):
    cache = model.new_cache(2)
    steps = [model(token, cache=cache)[0] for token in ids.split(1, dim=1)]
    float64_bounds.output("logits", torch.cat(steps, dim=1), model(ids)[0])


def test_packed_is_separate(model, float64_bounds):
    lengths = [9, 0, 17, 1]
    ids = torch.randint(256, (1, 30))
    logits, _ = model(ids, layout=SequenceLayout.from_lengths(lengths, tokens=30))
    documents = [document for document in ids.split([*lengths, 3], dim=1)[:-1] if document.shape[1] > 0]
    separate = torch.cat([model(document)[0] for document in documents], dim=1)
    float64_bounds.output("logits", logits[:, :27], separate)


def test_packed_prompts_go_on_together(model, float64_bounds):
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


def test_logits_of_some_places_are_those_of_all(model, ids, float64_bounds):
    """Where labels are few: the same loss, and its gradients, from their logits alone."""
    places = torch.tensor([[3, 4, 36], [0, 20, 21]])
    labels = torch.randint(256, places.shape)
    few, loss = model(ids, labels, places=places)
    logits, whole = model(ids, torch.full_like(ids, -100).scatter_(1, places, labels))
    float64_bounds.output("logits", few, torch.stack([row[at] for row, at in zip(logits, places)]))
    float64_bounds.output("loss", loss, whole)
    same_gradients(model, loss, whole, float64_bounds)
    assert model(ids, places=places)[1] is None


def test_no_label_that_counts_is_no_loss(model, ids):
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
    """Two results of one model have the same gradients with respect to every parameter, none of them zero."""
    arrow = torch.randn_like(truth)
    parameters = dict(model.named_parameters())
    mine, true = (torch.autograd.grad(y, parameters.values(), arrow, retain_graph=True) for y in (got, truth))
    for name, ours, expected in zip(parameters, mine, true, strict=True):
        assert expected.abs().max() > 0, f"{name}: a gradient of zero shows nothing"
        float64_bounds.gradient(name, ours, expected)


def test_packed_is_separate_in_every_gradient(model, float64_bounds):
    lengths = [9, 0, 17, 1]
    ids = torch.randint(256, (1, 30))
    logits, _ = model(ids, layout=SequenceLayout.from_lengths(lengths, tokens=30))
    documents = [document for document in ids.split([*lengths, 3], dim=1)[:-1] if document.shape[1] > 0]
    separate = torch.cat([model(document)[0] for document in documents], dim=1)
    same_gradients(model, logits[:, :27], separate, float64_bounds)


def test_gradients_pass_through_the_cache(model, ids, float64_bounds):
    """At whole mini-batches of TTT, whose open ones are constants."""
    cache = model.new_cache(2)
    pieces = [model(piece, cache=cache)[0] for piece in ids[:, :32].split(16, dim=1)]
    same_gradients(model, torch.cat(pieces, dim=1), model(ids[:, :32])[0], float64_bounds)


@pytest.mark.long
# Dynamo makes an object of each autograd.Function it traces, which PyTorch itself deprecates.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_one_graph_with_its_gradients(model, ids, packed, float64_bounds):
    """All mixers, the loss and the backward, compiled whole."""
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    layout = SequenceLayout.from_lengths([9, 0, 17, 1], tokens=37) if packed else None
    ids = ids[:1] if packed else ids
    (got, loss), (truth, true_loss) = (run(ids, ids.roll(-1, dims=1), layout=layout) for run in (compiled, model))
    float64_bounds.output("logits", got, truth)
    float64_bounds.output("loss", loss, true_loss)
    same_gradients(model, loss, true_loss, float64_bounds)


def test_a_step_of_decoding_is_one_graph(model, ids, float64_bounds):
    """A prompt read plainly, then steps of one compiled graph that moves the cache on."""
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
    """Against a central difference along one random direction per parameter."""
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
    """Prompt, one token, more tokens: logits and every tensor of the cache."""

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


def test_first_weights_grow_smaller_with_depth():
    deviation = {}
    for depth in (2, 8):
        model = Decoder(DecoderConfig(**SMALL | {"hidden_size": 128, "head_dim": 64, "num_layers": depth}))
        deviation[depth] = [model.blocks[0].mixer.out.weight.std().item(), model.blocks[1].mlp.out.weight.std().item()]
        assert 0.019 < model.blocks[0].mixer.qkv.weight.std().item() < 0.021
        assert 0.019 < model.embedding.weight.std().item() < 0.021
    for shallow, deep in zip(*deviation.values(), strict=True):
        assert 0.0095 < shallow < 0.0105 and 1.9 < shallow / deep < 2.1


def test_mistakes_are_named(model, ids):
    layout = SequenceLayout.from_lengths([10])
    for arguments, message in [
        (([1, 2],), "Decoder: ids must be a torch.Tensor, got list"),
        ((ids[0],), r"Decoder: ids must be \[B, T\] = \[B, T\], got \[37\]"),
        ((ids.float(),), "Decoder: ids must be int32 or int64, got float32"),
        ((ids, ids[:, 1:]), r"Decoder: labels must be \[B, T\] = \[2, 37\], got \[2, 36\]"),
        ((ids, ids.int()), "Decoder: labels must be int64, got int32"),
        ((ids, ids.tolist()), "Decoder: labels must be a torch.Tensor, got list"),
    ]:
        with pytest.raises((ValueError, TypeError), match=f"^{message}$"):
            model(*arguments)
    for keywords, message in [
        ({"layout": layout}, r"Decoder: ids must be \[1, T\] = \[1, 10\] for its layout, got \[2, 37\]"),
        ({"layout": layout.cu_seqlens}, "Decoder: layout must be a SequenceLayout or None, got Tensor"),
        ({"places": ids[:1]}, r"Decoder: places must be \[B, n\], B = 2, got \[1, 37\]"),
        ({"places": ids[0]}, r"Decoder: places must be \[B, n\], B = 2, got \[37\]"),
        ({"places": ids.int()}, "Decoder: places must be int64, got int32"),
        ({"places": ids[:, :2], "labels": ids}, r"Decoder: labels must be \[B, n\] = \[2, 2\], got \[2, 37\]"),
        ({"cache": model.new_cache(3)}, "Decoder: cache must hold the 2 sequences of ids, got 3"),
        ({"cache": [{}] * 5}, "Decoder: cache must be a DecodingCache, a PooledCache or None, got list"),
    ]:
        with pytest.raises((ValueError, TypeError), match=f"^{message}$"):
            model(ids, **keywords)
    packed = {"layout": layout, "places": ids[:1, :2]}
    with pytest.raises(ValueError, match=r"^Decoder: places must come without layout and cp_context, got a layout$"):
        model(ids[:1, :10], **packed)
    other = Decoder(DecoderConfig(**SMALL | {"num_layers": 2})).new_cache(2)
    with pytest.raises(ValueError, match=r"^Decoder: cache must have 5 layers, got 2$"):
        model(ids, cache=other)
    with pytest.raises(TypeError, match=r"^Decoder: config must be a DecoderConfig, got dict$"):
        Decoder(SMALL)


# --- generation ------------------------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_a_full_recompute(model, ids):
    whole = ids
    for _ in range(20):
        whole = torch.cat([whole, model(whole)[0][:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(model.generate(ids, 20, temperature=0), whole)


def test_a_long_prompt_is_read_in_pieces(model, ids, monkeypatch):
    whole = model.generate(ids, 8, temperature=0)
    monkeypatch.setattr(models, "PREFILL_TOKENS", 10)
    assert torch.equal(model.generate(ids, 8, temperature=0), whole)


def test_a_seed_repeats_the_draws(model, ids):
    random = torch.get_rng_state()
    first, again, other = (model.generate(ids, 16, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), random)
    drawn = model.generate(ids, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(drawn, first)


def test_packed_prompts_are_continued_as_if_alone():
    """Prompts of any lengths, read together; longer ones in pieces. Draws are those of a prompt that is alone."""
    torch.manual_seed(3)
    config = DecoderConfig(hidden_size=16, num_layers=3, pattern="gdn attention ttt_linear", num_heads=2, head_dim=8)
    model = Decoder(config).double()
    prompts = [torch.randint(256, (1, length)) for length in (3, 150, 1, 70)]
    layout = SequenceLayout.from_lengths([prompt.shape[1] for prompt in prompts])
    for options in ({"temperature": 0}, {"seed": 5, "temperature": 0.9, "top_k": 40}):
        together = model.stream(torch.cat(prompts, 1), 6, layout=layout, shared_draws=True, **options)
        rows = torch.stack(list(together), 1)
        for prompt, row in zip(prompts, rows, strict=True):
            assert torch.equal(model.generate(prompt, 6, **options)[0, prompt.shape[1] :], row)


def test_a_prompt_without_tokens_is_refused(model):
    layout = SequenceLayout.from_lengths([3, 0, 2])
    with pytest.raises(ValueError, match=r"^Decoder.generate: layout must have prompts of at least one token, got"):
        model.stream(torch.zeros(1, 5, dtype=torch.int64), 3, layout=layout)


@torch.no_grad()
def test_pools_hold_what_a_cache_holds():
    """Prompts of any lengths and single tokens, through slots in any order, beside sequences that are not called."""
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


def test_a_stream_is_what_generate_collects(model, ids):
    tokens = list(model.stream(ids, 9, seed=5, temperature=0.7))
    assert len(tokens) == 9 and all(token.shape == (2,) for token in tokens)
    collected = model.generate(ids, 9, seed=5, temperature=0.7)
    assert torch.equal(collected, torch.cat([ids, torch.stack(tokens, dim=1)], dim=1))


def test_draws_follow_the_distribution():
    """30,000 draws of four tokens, cut by each option, against the probabilities that remain."""
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0]).log1p().expand(30_000, 4)  # 2 : 4 : 3 : 1
    for options, truth in [
        ((1.0, None, None), [0.2, 0.4, 0.3, 0.1]),
        ((0.5, None, None), [4 / 30, 16 / 30, 9 / 30, 1 / 30]),
        ((1.0, 2, None), [0, 4 / 7, 3 / 7, 0]),
        ((1.0, 9, None), [0.2, 0.4, 0.3, 0.1]),
        ((1.0, None, 0.75), [2 / 9, 4 / 9, 3 / 9, 0]),
        ((1.0, None, 0.05), [0, 1, 0, 0]),
        ((0.0, None, None), [0, 1, 0, 0]),
    ]:
        draw = models._Draw(*options, torch.Generator().manual_seed(0))
        share = torch.bincount(draw(logits), minlength=4) / 30_000
        truth = torch.tensor(truth)
        assert torch.equal(share > 0, truth > 0)
        assert (share - truth).abs().max() < 0.012  # four standard deviations


def test_a_row_ends_at_its_stop_token(model, ids):
    free = model.generate(ids, 20, temperature=0)
    stop = int(free[0, ids.shape[1] + 4])
    first = [(row == stop).nonzero() for row in free[:, ids.shape[1] :]]
    ends = [int(found[0]) if len(found) else 19 for found in first]
    stopped = model.generate(ids, 20, temperature=0, stop=stop)
    assert stopped.shape[1] == ids.shape[1] + max(ends) + 1
    for row, end in enumerate(ends):
        new = stopped[row, ids.shape[1] :]
        assert torch.equal(new[: end + 1], free[row, ids.shape[1] :][: end + 1])
        assert (new[end + 1 :] == stop).all()


def test_memory_does_not_grow(model, ids):
    cache = model.new_cache(2)
    with torch.inference_mode():
        model(ids, cache=cache)
        size = cache.nbytes
        for _ in range(10):
            model(ids[:, :1], cache=cache)
            assert cache.nbytes == size > 0


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"temperature": "hot"}, "temperature must be a number, got str"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 1, "generator": torch.Generator()}, "seed must be None where a generator is given, got 1"),
        ({"stop": -1}, "stop must be at least 0, got -1"),
        ({"ids": torch.zeros(1, 0, dtype=torch.int64)}, r"ids must hold at least one token, got \[1, 0\]"),
    ],
)
def test_generation_mistakes_are_named_before_the_first_token(model, ids, keywords, message):
    with pytest.raises((ValueError, TypeError), match=f"^Decoder.generate: {message}$"):
        model.stream(**{"ids": ids, "max_new_tokens": 3} | keywords)


# --- disk ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_gives_the_same_bits(config, ids, dtype, tmp_path):
    model = Decoder(config).to(dtype)
    model.blocks[0].mixer.decay_parameters.float()
    model.save(tmp_path / "run" / "model")
    again = Decoder.load(tmp_path / "run" / "model")
    assert again.config == config
    assert [(n, p.dtype, p.requires_grad) for n, p in again.named_parameters()] == [
        (n, p.dtype, p.requires_grad) for n, p in model.named_parameters()
    ]
    assert torch.equal(again(ids)[0], model(ids)[0])
    assert sorted(path.name for path in (tmp_path / "run" / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_names_on_disk_are_stable():
    names = set(Decoder(DecoderConfig(num_layers=1, pattern="attention", tied=False)).state_dict())
    assert names == {
        "embedding.weight",
        "blocks.0.mixer_norm.weight",
        "blocks.0.mixer.qkv.weight",
        "blocks.0.mixer.out.weight",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.out.weight",
        "norm.weight",
        "head.weight",
    }


def test_the_backend_is_the_instance_s_and_reaches_every_operator(config, ids, tmp_path, taken_for_cuda):
    model = Decoder(config, backend="eager")
    model(ids, ids)[1].backward()
    model.generate(ids, 3)
    assert "backend" not in model.config.to_json()
    model.save(tmp_path)
    Decoder.load(tmp_path, backend="eager")(ids)
    rules = {operator for operator, _ in taken_for_cuda} - {"causal_conv1d", "rms_norm_gated"}
    chunked = ("chunk_gated_delta_rule", "chunk_kda", "chunk_ttt_linear", "chunk_delta_rule")
    assert rules == {*chunked, *(rule.replace("chunk", "fused_recurrent") for rule in chunked)}
    assert {backend for _, backend in taken_for_cuda} == {"eager"}
    for unasked in (Decoder(config), Decoder.load(tmp_path)):
        with pytest.raises(UnsupportedError, match="an argument of every operator and of the layer or decoder"):
            unasked(ids)


def test_a_backend_is_no_matter_of_the_configuration(config):
    with pytest.raises(ValueError, match=r"^DecoderConfig: options\['kda'\] must be among .*, got 'backend'"):
        dataclasses.replace(config, options={"kda": {"backend": "eager"}})
    with pytest.raises(ValueError, match=r"^Decoder: backend must be one of None, 'eager', .*, got 'cuda'"):
        Decoder(config, backend="cuda")


def test_loading_mistakes_are_named(config, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        Decoder.load(tmp_path)
    Decoder(config).save(tmp_path)
    (tmp_path / "config.json").write_text(dataclasses.replace(config, num_layers=3).to_json())
    with pytest.raises(ValueError, match=r"^Decoder.load: .*model.safetensors must hold what config.json describes; "):
        Decoder.load(tmp_path)


def test_without_safetensors_the_extra_is_named(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for action in (lambda: Decoder(config).save(tmp_path), lambda: Decoder.load(tmp_path)):
        with pytest.raises(ImportError, match=r"wyfold\[cli\]"):
            action()
    assert list(tmp_path.iterdir()) == []


# --- memory of a training step ---------------------------------------------------------------------------------------


def kept_bytes(model: Decoder, ids: torch.Tensor, **where) -> tuple[int, list[torch.Tensor]]:
    """Bytes that autograd keeps of a forward, but for parameters, and the gradients of a backward."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        _, loss = model(ids, ids, **where)
    loss.backward()
    return sum(kept.values()), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_computed_again_has_the_same_bits_and_needs_less_memory(model, ids, packed):
    where = {}
    if packed:
        ids, where = ids[:1], {"layout": SequenceLayout.from_lengths([20, 0, 17])}
    whole, truth = kept_bytes(model, ids, **where)
    for what in models.RECOMPUTED:
        model.recompute(what)
        less, found = kept_bytes(model, ids, **where)
        assert less < whole / 2
        assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
    model.recompute(None)
    assert kept_bytes(model, ids, **where)[0] == whole


def test_selective_recomputing_runs_no_recurrence_twice(model, ids, monkeypatch):
    forward, runs = pipeline.delta_parts.forward, []
    monkeypatch.setattr(pipeline.delta_parts, "forward", lambda *given: runs.append(1) or forward(*given))
    counts = {}
    for what in (None, *models.RECOMPUTED):
        runs.clear()
        model.recompute(what)
        model(ids, ids)[1].backward()
        counts[what] = len(runs)
    assert counts == {None: 3, "selective": 3, "blocks": 6}


def test_what_else_might_be_computed_again_is_refused(model):
    with pytest.raises(ValueError, match="what must be"):
        model.recompute("everything")
