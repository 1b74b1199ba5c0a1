"""Wrappers of other libraries around a decoder or its layers.

Covered are hooks that move, cast and rebuild arguments, adapters that replace a projection, compilers, and copies. LoRA
on the output matrix had no effect, because the code read its weight and did not call the module. Logits under CPU
offload were uninitialised memory, because a weight on the meta device was used in a product.
"""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from wyfold import SequenceLayout
from wyfold.layers import DecodingCache, LayerCache
from wyfold.models import Decoder, DecoderConfig

PATTERN = "gdn kda ttt_linear delta_net attention"
PROMPT, STEPS = 10, 6


def decoder(pattern: str = PATTERN, **options) -> Decoder:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_heads": 2, "head_dim": 16, "num_layers": len(pattern.split())}
    model = Decoder(DecoderConfig(pattern=pattern, **sizes, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(256, (2, PROMPT + STEPS))


def decoded(model: nn.Module, ids: torch.Tensor, cache) -> torch.Tensor:
    """Logits of a prompt and of the single tokens after it, each a tensor with separate memory as in `generate`."""
    with torch.no_grad():
        pieces = [ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)]
        return torch.cat([model(piece.clone(), cache=cache)[0] for piece in pieces], dim=1)


def caches(model: Decoder):
    """A cache of two sequences, and pools if the model supports them."""
    yield model.new_cache(2)
    if "attention" not in model.config.pattern:
        yield model.new_pools(2).at()


# --- Arguments rebuilt by wrappers -----------------------------------------------------------------------------------


def rebuilt_by_fsdp(x):
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor, x)


def rebuilt_by_trees(x):
    return torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, x)


def rebuilt_by_ddp(x):
    from torch.distributed.utils import _recursive_to

    return _recursive_to(x, torch.device("cpu"), False)[0]


def rebuilt_by_accelerate(x):
    from accelerate.utils import send_to_device

    return send_to_device(x, torch.device("cpu"), non_blocking=True)


def rebuilt_for_output(x):
    from accelerate.utils.operations import convert_to_fp32

    return convert_to_fp32(x)


@pytest.mark.parametrize(
    "rebuilt", [rebuilt_by_fsdp, rebuilt_by_trees, rebuilt_by_ddp, rebuilt_by_accelerate, rebuilt_for_output]
)
def test_caches_are_passed_on_as_they_are(rebuilt):
    model = decoder("gdn kda")
    pools = model.new_pools(2)
    for cache in (model.new_cache(2), model.new_cache(2).layers[0], pools.at(), pools.at().layers[0], pools):
        assert rebuilt(cache) is cache
        (inside,) = rebuilt((cache,))
        assert inside is cache


def test_a_dict_is_refused_since_it_would_be_copied(ids):
    layer = decoder("gdn").blocks[0].mixer
    x = torch.randn(2, 3, 32)
    for module, name in ((layer, "GatedDeltaNet"), (layer.conv, "ShortConvolution")):
        with pytest.raises(
            TypeError, match=rf"^{name}: cache must be a wyfold.layers.LayerCache or None, got dict; pass"
        ):
            module(x if module is layer else layer.qkv(x), cache={})
    with pytest.raises(TypeError, match=r"^DecodingCache: layers must each be a wyfold.layers.LayerCache, got dict$"):
        DecodingCache([{}], 2)
    with pytest.raises(
        TypeError, match=r"^SoftmaxAttention: cache must be a wyfold.layers.LayerCache .* got LayerPool$"
    ):
        pool = layer.new_pool(2)
        decoder("attention").blocks[0].mixer(x, cache=pool)


def test_moving_a_cache_moves_it_in_place_and_casts_no_state(ids):
    model = decoder()
    cache = model.new_cache(2)
    decoded(model, ids, cache)
    layer = cache.layers[0]
    assert cache.to("cpu", non_blocking=True) is cache and cache.to("cpu", torch.bfloat16) is cache
    assert cache.layers[0] is layer
    dtypes = [{name: x.dtype for name, x in layer.items()} for layer in cache.layers]
    assert dtypes[0] == {"conv": torch.bfloat16, "state": torch.float32}
    assert dtypes[4] == {"keys": torch.bfloat16, "values": torch.bfloat16, "positions": torch.int64}
    assert dtypes[2].pop("position") == torch.int32 and dtypes[2].pop("conv") == torch.bfloat16
    assert set(dtypes[2].values()) == {torch.float32}
    assert {x.dtype for x in cache.to(state_dtype=torch.bfloat16).layers[0].values()} == {torch.bfloat16}
    with pytest.raises(TypeError, match=r"^LayerCache.to: device must be a device or None, got torch.bfloat16; cast"):
        cache.to(torch.bfloat16)


# --- Wrappers --------------------------------------------------------------------------------------------------------


def hooked(model: Decoder) -> nn.Module:
    """Accelerate's hook on every module: arguments to a device, results back."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for module in list(model.modules()):
        add_hook_to_module(module, AlignDevicesHook(execution_device=torch.device("cpu"), io_same_device=True))
    return model


def offloaded(model: Decoder) -> nn.Module:
    """Parameters on the meta device that are loaded for the call of the module that owns them."""
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"))


def offloaded_to_disk(model: Decoder, folder) -> nn.Module:
    from accelerate import disk_offload

    return disk_offload(model, folder, execution_device=torch.device("cpu"))


def dispatched(model: Decoder, folder) -> nn.Module:
    """A device map with some blocks on the device and others offloaded."""
    from accelerate import dispatch_model

    parts = {"embedding": "cpu", "norm": "cpu", "head": "cpu"}
    blocks = {f"blocks.{n}": "disk" if n % 2 else "cpu" for n in range(len(model.blocks))}
    kept = {name for name, _ in model.named_children()}
    return dispatch_model(
        model,
        {k: v for k, v in parts.items() if k in kept} | blocks,
        main_device="cpu",
        offload_dir=folder,
        force_hooks=True,
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("pattern", [PATTERN, "gdn kda"])
@pytest.mark.parametrize("wrapped", [hooked, offloaded, offloaded_to_disk, dispatched])
def test_hooks_that_move_parameters_change_nothing(wrapped, pattern, tied, ids, tmp_path):
    plain = decoder(pattern, tied=tied)
    truth = [decoded(plain, ids, cache) for cache in caches(plain)]
    tokens = plain.generate(ids, 3, temperature=0)
    ours = copy.deepcopy(plain)
    ours = wrapped(ours) if wrapped in (hooked, offloaded) else wrapped(ours, tmp_path)
    for cache, logits in zip(caches(plain), truth, strict=True):
        assert torch.equal(decoded(ours, ids, cache), logits)
    assert torch.equal(ours.generate(ids, 3, temperature=0), tokens)


def test_pools_and_files_of_an_offloaded_decoder(ids, tmp_path):
    """Pools on an explicit device, and files written from gathered tensors."""
    from accelerate.utils.modeling import get_state_dict_offloaded_model

    plain = decoder("gdn kda")
    ours = offloaded(copy.deepcopy(plain))
    with pytest.raises(ValueError, match=r"^GatedDeltaNet.new_pool: device must be given for a layer whose parameters"):
        ours.new_pools(2)
    truth = decoded(plain, ids, plain.new_pools(2).at())
    assert torch.equal(decoded(ours, ids, ours.new_pools(2, device="cpu").at()), truth)
    with pytest.raises(ValueError, match=r"^Decoder.save: state_dict must hold ordinary tensors, got one on the meta"):
        ours.save(tmp_path)
    assert not list(tmp_path.iterdir())
    ours.save(tmp_path, state_dict=get_state_dict_offloaded_model(ours))
    assert torch.equal(Decoder.load(tmp_path)(ids)[0], plain(ids)[0])


@pytest.mark.parametrize("target", ["head", "qkv"])
def test_an_adapter_is_applied_and_learns(target, ids, float64_bounds):
    """LoRA on the output matrix and on a projection changes logits, decodes consistently, and gets gradients."""
    from peft import LoraConfig, get_peft_model

    plain = decoder("gdn attention", tied=False).double()
    ours = get_peft_model(copy.deepcopy(plain), LoraConfig(r=2, target_modules=[target], init_lora_weights=False))
    before, after = plain(ids)[0], ours(ids)[0]
    assert (after - before).abs().max() > 1e-3
    float64_bounds.output("logits", decoded(ours, ids, plain.new_cache(2)), after)
    whole = ours.base_model.model.generate(ids, 3, temperature=0)
    assert torch.equal(whole[:, ids.shape[1]], after[:, -1].argmax(-1))
    ours(ids, ids)[1].backward()
    gradients = [p.grad for name, p in ours.named_parameters() if "lora_" in name]
    assert gradients and all(grad.abs().max() > 0 for grad in gradients)
    merged = ours.merge_and_unload()
    float64_bounds.output("merged", merged(ids)[0], after)


def test_files_of_an_adapted_decoder(ids, tmp_path, float64_bounds):
    from peft import LoraConfig, get_peft_model

    ours = get_peft_model(
        decoder("gdn", tied=False).double(), LoraConfig(r=2, target_modules=["head"], init_lora_weights=False)
    )
    with pytest.raises(
        ValueError, match=r"^Decoder.save: state_dict must hold head.weight \(1 such names\); modules that"
    ):
        ours.base_model.model.save(tmp_path)
    after = ours(ids)[0]
    ours.merge_and_unload().save(tmp_path)
    float64_bounds.output("logits", Decoder.load(tmp_path)(ids)[0], after)


def test_an_adapter_of_a_tied_embedding_is_refused(ids):
    from peft import LoraConfig, get_peft_model

    ours = get_peft_model(decoder("gdn"), LoraConfig(r=2, target_modules=["embedding"]))
    with pytest.raises(
        ValueError, match=r"^Decoder: embedding must not be adapted where it is the output matrix as well"
    ):
        ours(ids)
    saved = get_peft_model(decoder("gdn"), LoraConfig(r=2, target_modules=["qkv"], modules_to_save=["embedding"]))
    assert torch.equal(saved(ids)[0], decoder("gdn")(ids)[0])
    saved(ids, ids)[1].backward()
    own = {name: p.grad for name, p in saved.named_parameters() if p.grad is not None and "embedding" in name}
    assert len(own) == 1 and all(grad.abs().max() > 0 for grad in own.values())


def test_copies_during_decoding_continue_like_the_original(ids):
    """`copy.deepcopy` and pickles of a model with its cache or pools, `copy.copy` and `snapshot` of a cache."""
    for pattern in (PATTERN, "gdn kda"):
        model = decoder(pattern)
        for cache in caches(model):
            truth = decoded(model, ids, cache)
        for cache in caches(model):
            with torch.no_grad():
                model(ids[:, :PROMPT], cache=cache)
                copies = [copy.deepcopy((model, cache)), pickle.loads(pickle.dumps((model, cache)))]
                if isinstance(cache, DecodingCache):
                    copies += [(model, copy.copy(cache)), (model, cache.snapshot())]
                for other, kept in [*copies, (model, cache)]:
                    steps = ids[:, PROMPT:].split(1, dim=1)
                    logits = torch.cat([other(token, cache=kept)[0] for token in steps], dim=1)
                    assert torch.equal(logits, truth[:, PROMPT:])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("pattern", ["ttt_linear", pytest.param("kda", marks=pytest.mark.release)])
def test_decoding_by_compiled_blocks_is_decoding(ids, pattern):
    """Blocks of each kind of state, compiled inside an eager decoder."""
    plain = decoder(pattern)
    truth = decoded(plain, ids, plain.new_cache(2))
    torch._dynamo.reset()
    blocks = copy.deepcopy(plain)
    for n, block in enumerate(blocks.blocks):
        blocks.blocks[n] = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert torch.equal(decoded(blocks, ids, blocks.new_cache(2)), truth)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_decoding_by_a_compiled_decoder_is_decoding(ids):
    """A decoder compiled in place, and its other methods, which call it.

    `models/test_decoder.py` compiles decoders of all mixers.
    """
    plain = decoder("gdn")
    truth, tokens = decoded(plain, ids, plain.new_cache(2)), plain.generate(ids[:, :PROMPT], 2, temperature=0)
    torch._dynamo.reset()
    ours, counter = copy.deepcopy(plain), CompileCounterWithBackend("aot_eager")
    ours.compile(fullgraph=True, backend=counter)
    assert torch.equal(ours.generate(ids[:, :PROMPT], 2, temperature=0), tokens)
    with torch.inference_mode():  # as in `generate`, with whose tokens each step shares one graph
        assert torch.equal(decoded(ours, ids, ours.new_cache(2)), truth)
    assert counter.frame_count == 3


def test_files_of_a_decoder_with_compiled_blocks(ids, tmp_path):
    plain = decoder("gdn kda")
    plain.blocks[0] = torch.compile(plain.blocks[0], backend="eager")
    plain.save(tmp_path)
    assert torch.equal(Decoder.load(tmp_path)(ids)[0], decoder("gdn kda")(ids)[0])


def test_a_checkpoint_around_a_block_and_its_cache_is_refused(ids):
    """It would recompute the block from the state that the first run left, with wrong gradients."""
    from torch.utils.checkpoint import checkpoint

    layer, cache = decoder("gdn").blocks[0].mixer, LayerCache()
    x = torch.randn(2, 4, 32, requires_grad=True)
    layer(x.detach(), cache=cache)
    cache.detach()
    for reentrant in (False, True):
        y = checkpoint(lambda x: layer(x, cache=cache), x, use_reentrant=reentrant)
        with pytest.raises(
            RuntimeError, match=r"^LayerCache: a layer must not be called with a cache inside a backward"
        ):
            y.sum().backward()
        cache.detach()


def test_casting_hooks_of_a_projection_run():
    """A projection whose storage dtype differs from its compute dtype, as in diffusers' layerwise casting."""
    layer = decoder("gdn").blocks[0].mixer.bfloat16()
    x = torch.randn(1, 5, 32).bfloat16()
    truth = layer(x)
    layer.qkv.to(torch.float64)
    layer.qkv.register_forward_pre_hook(lambda module, given: module.to(torch.bfloat16) and None)
    assert torch.equal(layer(x), truth)


def test_packed_prompts_under_hooks(ids):
    plain = decoder()
    layout = SequenceLayout.from_lengths([7, PROMPT + STEPS - 7])
    truth = list(plain.stream(ids[:1], 3, temperature=0, layout=layout))
    found = hooked(copy.deepcopy(plain)).stream(ids[:1], 3, temperature=0, layout=layout)
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


# --- Subclasses and their files --------------------------------------------------------------------------------------


class Buffered(Decoder):
    def __init__(self, config, *, backend=None):
        super().__init__(config, backend=backend)
        self.register_buffer("scale", torch.ones(3))


class OfSize(Decoder):
    """A subclass whose constructor takes no configuration."""

    def __init__(self, width):
        super().__init__(DecoderConfig(hidden_size=width, num_layers=1, pattern="gdn", num_heads=2, head_dim=8))
        self.extra = nn.Linear(width, 2)


class Named(Decoder):
    """A subclass whose constructor accepts any first argument and builds another model than the saved one."""

    def __init__(self, name, width=16):
        super().__init__(DecoderConfig(hidden_size=width, num_layers=1, pattern="gdn", num_heads=2, head_dim=8))


def test_files_of_a_subclass_with_a_buffer(tmp_path):
    model = Buffered(decoder("gdn").config)
    model.scale.fill_(7)
    model.save(tmp_path)
    assert torch.equal(Buffered.load(tmp_path).scale, model.scale)


@pytest.mark.parametrize("build", [lambda: OfSize(32), lambda: Named("mine", 32)], ids=["size", "name"])
def test_files_of_a_subclass_that_no_configuration_builds(build, tmp_path):
    """`save` built a second model from the configuration, and the subclass's constructor raised TypeError."""
    from safetensors.torch import load_file

    model = build()
    model.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(x, saved[name]) for name, x in model.state_dict().items())
    with pytest.raises(ValueError, match=r"^Decoder.save: state_dict must hold norm.weight \(1 such names\)"):
        model.save(tmp_path, state_dict={name: x for name, x in saved.items() if name != "norm.weight"})


# --- LayerCache as a mapping -----------------------------------------------------------------------------------------


def test_a_layer_cache_is_made_and_updated_from_mappings():
    x, y = torch.ones(2, 3), torch.zeros(2, 1)
    cache = LayerCache({"conv": x})
    for given in ({"state": y}, LayerCache({"state": y}), [("state", y)]):
        other = LayerCache(cache)
        other.update(given)
        assert other.get("conv") is x and other.get("state") is y and len(cache) == 1
    del other["conv"]
    assert list(other) == ["state"]
    other.clear()
    assert len(other) == 0


def test_a_saved_layer_cache_continues(ids, tmp_path):
    layer = decoder("gdn").blocks[0].mixer
    x = torch.randn(2, 5, 32)
    cache = LayerCache()
    with torch.no_grad():
        layer(x, cache=cache)
        torch.save(dict(cache.items()), tmp_path / "cache.pt")
        loaded = LayerCache(torch.load(tmp_path / "cache.pt"))
        assert torch.equal(layer(x[:, :1], cache=loaded), layer(x[:, :1], cache=cache))


@pytest.mark.parametrize("change", [LayerCache, LayerCache({"conv": torch.ones(2)}).update], ids=["new", "update"])
@pytest.mark.parametrize(
    ("given", "error", "complaint"),
    [
        ({"state": 3}, TypeError, "LayerCache: 'state' must be a torch.Tensor, got int"),
        ({3: torch.ones(2)}, TypeError, "LayerCache: names must be str, got int"),
        ({"state": torch.tensor(3.0)}, ValueError, r"LayerCache: 'state' must be \[N, ...\], a row for each sequence"),
    ],
)
def test_what_a_layer_cache_cannot_hold_is_refused(change, given, error, complaint):
    with pytest.raises(error, match=f"^{complaint}"):
        change(given)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([0.0, 1.0], "rows must be int32 or int64, got float32"),
        ([True, False], "rows must be int32 or int64, got bool"),
        ([0, 2], r"rows must be in \[0, 2\), got 2"),
        ([-1], r"rows must be in \[0, 2\), got -1"),
    ],
)
def test_rows_that_a_cache_does_not_have_are_refused(rows, complaint):
    first, second = LayerCache({"state": torch.arange(2.0)}), LayerCache()
    with pytest.raises(ValueError, match=f"^LayerCache.reorder: {complaint}$"):
        first.reorder(torch.tensor(rows))
    with pytest.raises(ValueError, match=f"^DecodingCache.reorder: {complaint}$"):
        DecodingCache([first, second], 2).reorder(torch.tensor(rows))
    assert first["state"].tolist() == [0, 1]


def test_a_layer_called_by_a_gradient_hook_is_refused_by_that_name():
    layer, x = decoder("gdn").blocks[0].mixer, torch.ones(1, 2, 32, requires_grad=True)
    x.register_hook(lambda gradient: layer(gradient, cache=LayerCache()))
    with pytest.raises(RuntimeError, match=r"a gradient hook that calls a layer has to do so without a cache"):
        x.sum().backward()
