"""Properties of every mixer: the same result for split, cached, packed and compiled calls; errors that name arguments.

Operators are bit-identical. Layers are so only for equal numbers of rows, because `nn.Linear` may sum in another order
for another number of rows. So exact equality is tested between runs with equal row counts; other runs are held to the
operators' float64 bound.
"""

import copy

import pytest
import torch

from wyfold import SequenceLayout
from wyfold.layers import (
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    GatedRMSNorm,
    KimiDeltaAttention,
    LayerCache,
    RWKV7TimeMix,
    TTTLinear,
)
from wyfold.models import DecoderConfig
from wyfold.reference import error

LENGTHS = [11, 0, 20, 1]  # packed documents; the buffer has 7 more rows
TOKENS = 39


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, TOKENS, 24, dtype=torch.float64)


def decode(layer, x, cache):
    """One call per token."""
    return torch.cat([layer(token, cache=cache) for token in x.split(1, dim=1)], dim=1)


def test_token_by_token_equals_one_call(mixer, x, float64_bounds):
    float64_bounds.output("y", decode(mixer, x, LayerCache()), mixer(x))


@pytest.mark.parametrize("pieces", [[7, 1, 20, 11], [16, 16, 7], [2, 37], [39, 0], [0, 3, 36]])
def test_split_calls_equal_one_call(mixer, x, pieces, float64_bounds):
    cache = LayerCache()
    y = torch.cat([mixer(piece, cache=cache) for piece in x.split(pieces, dim=1)], dim=1)
    float64_bounds.output("y", y, mixer(x))


def test_gradients_pass_through_the_cache(mixer, x, same_gradients):
    x.requires_grad_()
    cache = LayerCache()
    # Split at whole mini-batches of TTT, because an open one is a constant to the backward.
    y = torch.cat([mixer(piece, cache=cache) for piece in x[:, :36].split([16, 16, 4], dim=1)], dim=1)
    same_gradients(mixer, x, y[:, :32], mixer(x[:, :36])[:, :32])


def test_packed_equals_separate_calls(mixer, x, float64_bounds):
    documents = x[:1].split([*LENGTHS, 7], dim=1)[:-1]
    packed = mixer(x[:1], layout=SequenceLayout.from_lengths(LENGTHS, tokens=TOKENS))
    separate = torch.cat([mixer(document) for document in documents if document.shape[1] > 0], dim=1)
    float64_bounds.output("y", packed[:, : sum(LENGTHS)], separate)


def test_gradients_of_packed_equal_separate_calls(mixer, x, same_gradients):
    x = x[:1].requires_grad_()
    packed = mixer(x, layout=SequenceLayout.from_lengths(LENGTHS, tokens=TOKENS))
    documents = x.split([*LENGTHS, 7], dim=1)[:-1]
    separate = torch.cat([mixer(document) for document in documents if document.shape[1] > 0], dim=1)
    same_gradients(mixer, x, packed[:, : sum(LENGTHS)], separate)


@pytest.mark.parametrize("tokens", [24, 39])
def test_packed_rows_are_a_batch_bit_for_bit(mixer32, x, tokens):
    x = x[:, :tokens].float()
    packed = mixer32(x.reshape(1, 2 * tokens, -1), layout=SequenceLayout.from_lengths([tokens, tokens]))
    assert torch.equal(packed.view_as(x), mixer32(x))


def test_documents_are_independent(mixer32, x):
    x = x[:1].float().requires_grad_()
    layout = SequenceLayout.from_lengths(LENGTHS, tokens=TOKENS)
    other = x.detach().clone()
    other[:, :11], other[:, 31:] = 1e3, -7.0
    y, changed = mixer32(x, layout=layout), mixer32(other, layout=layout)
    assert torch.equal(y[:, 11:31], changed[:, 11:31])
    (dx,) = torch.autograd.grad(y[:, 11:31].square().sum(), x)
    assert dx[:, 11:31].abs().min() > 0
    assert not dx[:, :11].any() and not dx[:, 31:].any()


def test_rows_past_the_last_boundary_are_zero(mixer32, x):
    x = x[:1].float().requires_grad_()
    y = mixer32(x, layout=SequenceLayout.from_lengths(LENGTHS, tokens=TOKENS))
    assert not y[:, sum(LENGTHS) :].any()
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert not dx[:, sum(LENGTHS) :].any()


def test_causality(mixer32, x):
    x = x.float()
    later = x.clone()
    later[:, 21:] = 50.0
    assert torch.equal(mixer32(x)[:, :21], mixer32(later)[:, :21])


def test_packed_prompts_then_decoding_together(mixer, x, float64_bounds):
    """Packed prompts of different lengths, one of them empty; then batched decoding; then packed calls again."""
    cache = LayerCache()
    mixer(x[:1], layout=SequenceLayout.from_lengths(LENGTHS, tokens=TOKENS), cache=cache)
    following = torch.randn(len(LENGTHS), 9, 24, dtype=torch.float64)
    together = torch.cat([decode(mixer, following[:, :2], cache), mixer(following[:, 2:6], cache=cache)], dim=1)
    packed = mixer(following[:, 6:].reshape(1, -1, 24), layout=SequenceLayout.from_lengths([3] * 4), cache=cache)
    y = torch.cat([together, packed.view(4, 3, 24)], dim=1)
    documents = x[:1].split([*LENGTHS, 7], dim=1)[:-1]
    alone = [mixer(torch.cat([document, following[i : i + 1]], dim=1))[:, -9:] for i, document in enumerate(documents)]
    float64_bounds.output("y", y, torch.cat(alone))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_same_bits(mixer32, x, mode):
    x = x.float()
    cache = LayerCache()
    y = torch.cat([mixer32(x[:, :33], cache=cache), decode(mixer32, x[:, 33:], cache)], dim=1)
    with mode():
        cache = LayerCache()
        without = torch.cat([mixer32(x[:, :33], cache=cache), decode(mixer32, x[:, 33:], cache)], dim=1)
    assert y.requires_grad and not without.requires_grad
    assert torch.equal(y, without)


# Dynamo instantiates each traced autograd.Function, which PyTorch deprecates.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["ttt_linear", "window"])
def test_one_graph(build, x, name):
    """Packed prompts and a decoding step, each compiled as one graph, without reading boundaries or positions."""
    layer = build(name, torch.float32)
    layout = SequenceLayout.from_lengths(LENGTHS, tokens=TOKENS)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        packed, y = (run(x[:1].float(), layout=layout) for run in (compiled, layer))
        if name == "window":  # one mask in the graph, a loop over sequences outside: two orders of summation
            error.require(error.judge(packed, copy.deepcopy(layer).double()(x[:1], layout=layout), y, name="y"))
        else:
            assert torch.equal(packed, y)
        cache = LayerCache()
        layer(x.float(), cache=cache)
        step = x[:, :1].float()
        assert torch.equal(compiled(step, cache=cache.snapshot()), layer(step, cache=cache.snapshot()))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gated_delta_product", marks=pytest.mark.release),
        "rwkv7",
        pytest.param("ttt_linear", marks=pytest.mark.release),
    ],
)
def test_one_graph_with_its_gradients(build, x, name, same_gradients, float64_bounds):
    """Forward and backward of packed rows as one graph; the model's test compiles dense rows of all mixers.

    In float64, because a compiler may sum matrix products in another order.
    """
    layer, layout = build(name), SequenceLayout.from_lengths(LENGTHS, tokens=TOKENS)
    x = x[:1].requires_grad_()
    torch._dynamo.reset()
    got, truth = (run(x, layout=layout) for run in (torch.compile(layer, fullgraph=True, backend="aot_eager"), layer))
    float64_bounds.output("y", got, truth)
    same_gradients(layer, x, got, truth)


def test_16_bit_decoding_is_as_accurate_as_one_call(mixer, x):
    """Layers round to 16 bits between operators in either form; states stay wide."""
    layer16, x16 = copy.deepcopy(mixer).bfloat16(), x.bfloat16()
    truth = layer16.double()(x16.double())
    layer16.bfloat16()
    cache = LayerCache()
    decoded = torch.cat([layer16(x16[:, :30], cache=cache), decode(layer16, x16[:, 30:], cache)], dim=1)
    error.require(error.judge(decoded, truth, layer16(x16), name="y"))
    assert {cache[name].dtype for name in ("state", "bias", "grad") if name in cache} <= {torch.float32}


def test_a_cache_is_replaced_not_written(mixer, x):
    """So a shallow copy is a valid snapshot."""
    cache = LayerCache()
    mixer(x[:, :20], cache=cache)
    before = cache.snapshot()
    contents = {name: tensor.clone() for name, tensor in before.items()}
    first = mixer(x[:, 20:23], cache=cache)
    assert all(torch.equal(before[name], contents[name]) for name in before)
    assert torch.equal(mixer(x[:, 20:23], cache=before), first)


def test_errors_name_the_argument(mixer, x):
    name = type(mixer).__name__
    layout = SequenceLayout.from_lengths(LENGTHS, tokens=TOKENS)
    cache = LayerCache()
    mixer(x, cache=cache)
    with pytest.raises(ValueError, match=rf"^{name}: x must be \[B, T, 24\].*got \[2, 39, 23\]"):
        mixer(x[..., :23])
    with pytest.raises(TypeError, match=f"^{name}: x must be a torch.Tensor"):
        mixer([1.0])
    with pytest.raises(TypeError, match=f"^{name}: x must be a torch.Tensor, got NoneType"):
        mixer(None)
    with pytest.raises(ValueError, match=f"^{name}: x must be float32, .*, got int64"):
        mixer(x.long())
    with pytest.raises(
        TypeError, match=f"^{name}: x must be float64, as the layer's parameters are, .*, got bfloat16$"
    ):
        mixer(x.bfloat16())
    held = next(iter(cache))
    with pytest.raises(TypeError, match=rf"^LayerCache: '{held}' must be a torch.Tensor, got NoneType"):
        mixer(x, cache=LayerCache({**cache, held: None}))
    with pytest.raises(ValueError, match=rf"^{name}: x must be \[1, T, hidden_size\] = \[1, 39, 24\]"):
        mixer(x, layout=layout)
    with pytest.raises(TypeError, match=f"^{name}: layout must be a SequenceLayout"):
        mixer(x[:1], layout=layout.cu_seqlens)
    with pytest.raises(ValueError, match=rf"^{name}: cache must hold the 1 sequences of x, got '\w+' \[2, "):
        mixer(x[:1], cache=cache)
    with pytest.raises(ValueError, match=f"^{name}: cache must be empty or hold .*, got strange$"):
        mixer(x, cache=LayerCache({"strange": torch.zeros(len(x))}))
    with pytest.raises(TypeError, match=f"^{name}: cache must be a wyfold.layers.LayerCache or None, got list$"):
        mixer(x, cache=[cache])
    with pytest.raises(TypeError, match=f"^{name}: cp_context must be a ContextParallel or None, got SequenceLayout"):
        mixer(x, cp_context=layout)


def test_a_cache_of_other_sizes_or_kinds_is_refused(mixer, x):
    """The tensors of another layer, or of a damaged file, would reach PyTorch's errors or be read as something else."""
    name = type(mixer).__name__
    cache = LayerCache()
    mixer(x[:, :20], cache=cache)
    for held, tensor in cache.items():
        fraction = tensor.is_floating_point()
        spoiled = {
            "a dimension more": tensor[..., None],
            "another kind of numbers": tensor.int() if fraction else tensor.double(),
            "another device": tensor.to("meta"),
        }
        if tensor.ndim > 2 and held != "conv":  # a convolution may be given more inputs than it reads
            spoiled["another width"] = torch.cat([tensor, tensor], dim=-1)
        for what, wrong in spoiled.items():
            with pytest.raises(ValueError, match=rf"^{name}: cache\['{held}'\] must ") as refused:
                mixer(x[:, 20:22], cache=LayerCache({**cache, held: wrong}))
            assert "got" in str(refused.value), what


def test_a_wider_cache_of_keys_is_refused(build):
    layer, cache = build("attention", torch.float32), LayerCache()
    x = torch.randn(2, 9, 24)
    layer(x, cache=cache)
    for held in ("keys", "values"):
        with pytest.raises(
            ValueError, match=rf"^SoftmaxAttention: cache\['{held}'\] must be float32 or narrower.* got f"
        ):
            layer(x, cache=LayerCache({**cache, held: cache[held].double()}))
    narrow = LayerCache(dict(cache.items())).to(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x, cache=cache).shape == layer(x, cache=narrow).shape


def test_an_input_on_another_device_is_refused(mixer, x):
    with pytest.raises(
        ValueError, match=f"^{type(mixer).__name__}: x must be on cpu, as the layer's parameters are, got meta$"
    ):
        mixer(x.to("meta"))


@pytest.mark.parametrize("eps", [0.0, -1e-6, float("nan"), "1e-6"])
def test_norm_eps_is_checked_where_it_is_given(eps):
    layers = (
        DeltaNet, GatedDeltaNet, GatedDeltaNet2, GatedDeltaProduct, GatedLinearAttention, KimiDeltaAttention,
        RWKV7TimeMix, TTTLinear,
    )  # fmt: skip
    for layer in layers:
        with pytest.raises((TypeError, ValueError), match=f"^{layer.__name__}: norm_eps must be .*"):
            layer(32, 2, head_dim=16, norm_eps=eps)
    with pytest.raises((TypeError, ValueError), match=r"^DecoderConfig: norm_eps must be "):
        DecoderConfig(norm_eps=eps)
    with pytest.raises((TypeError, ValueError), match=r"^GatedRMSNorm: eps must be "):
        GatedRMSNorm(16, eps=eps)
