"""Modules built on the meta device and materialised by `to_empty` and `reset_parameters` were not fully initialised.

The weight of gated norms stayed uninitialised memory, and matrices had PyTorch's initialisation, not the decoder's.
"""

import copy
import gc
import math
import pickle
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.context_parallel.ranks import Case, failures_on_ranks
from torch import nn

from wyfold import layers
from wyfold.integrations import fla
from wyfold.models import Decoder, DecoderConfig

CONFIG = DecoderConfig(
    hidden_size=48,
    num_layers=6,
    pattern="gdn kda ttt_linear rwkv7 attention kda",
    num_heads=2,
    head_dim=16,
    tied=False,
    options={"kda": {"lower_bound": -5.0}},
)
MODULES = {
    "DeltaNet": lambda: layers.DeltaNet(48, 2, 4, 16, 8),
    "GatedDeltaNet": lambda: layers.GatedDeltaNet(48, 2, 4, 16, 8),
    "KimiDeltaAttention": lambda: layers.KimiDeltaAttention(48, 2, head_dim=16),
    "KimiDeltaAttention, bounded": lambda: layers.KimiDeltaAttention(48, 2, head_dim=16, lower_bound=-5.0),
    "TTTLinear": lambda: layers.TTTLinear(48, 2, head_dim=16),
    "TTTLinear, plain": lambda: layers.TTTLinear(48, 2, head_dim=16, conv_size=None, gated=False),
    "PaTHAttention": lambda: layers.PaTHAttention(48, 2, use_forget_gate=True, use_qk_norm=True, conv_bias=True),
    "RWKV7TimeMix": lambda: layers.RWKV7TimeMix(48, 3, head_dim=16, layer_idx=1, num_layers=3),
    "SoftmaxAttention": lambda: layers.SoftmaxAttention(48, 2, head_dim=16),
    "ShortConvolution": lambda: layers.ShortConvolution(48, bias=True),
    "GatedRMSNorm": lambda: layers.GatedRMSNorm(48),
    "DecayParameters": lambda: layers.DecayParameters(4, 16),
    "fla's ShortConvolution": lambda: fla.ShortConvolution(48, 4, bias=True),
    "fla's FusedRMSNormGated": lambda: fla.FusedRMSNormGated(48),
    "Decoder": lambda: Decoder(CONFIG),
    "Decoder, tied": lambda: Decoder(DecoderConfig(hidden_size=48, num_layers=1, num_heads=2, head_dim=16)),
}


def reset(module: nn.Module) -> None:
    """Call every `reset_parameters`, parents before children, as FSDP and torchtitan do."""
    for part in module.modules():
        if any(True for _ in part.parameters(recurse=False)):
            part.reset_parameters()


def from_meta(build) -> nn.Module:
    """Build on the meta device, then materialise with uninitialised memory and reset."""
    with torch.device("meta"):
        module = build()
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(math.nan)
    return module


@pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)
def test_from_meta_equals_a_new_module(build):
    """The bits of a module built on its device, and the spread of a new one."""
    new, other = build(), from_meta(build)
    spread = {name: x.std().item() for name, x in new.named_parameters() if x.numel() >= 300}
    for module in (new, other):
        torch.manual_seed(1)
        reset(module)
    for name, parameter in new.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter), name
        if spread.get(name):
            assert 0.8 < parameter.std().item() / spread[name] < 1.25, name


@pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)
def test_every_number_is_drawn_by_the_module_that_owns_it(build):
    module = from_meta(build)
    for name, part in module.named_modules():
        own = dict(part.named_parameters(recurse=False))
        if own:
            part.reset_parameters()
            assert all(x.isfinite().all() for x in own.values()), name


def test_a_decoder_resets_itself():
    ours = from_meta(MODULES["Decoder"])
    ours.reset_parameters()
    assert all(x.isfinite().all() for x in ours.parameters())
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), ours):  # a copy initialises its own parameters
        torch.manual_seed(2)
        again.reset_parameters()
        torch.manual_seed(2)
        ours.reset_parameters()
        assert all(torch.equal(x, ours.get_parameter(name)) for name, x in again.named_parameters())


def test_a_deleted_decoder_frees_every_parameter():
    """`reset_parameters` held a reference to its module: 15 of 28 parameters stayed until the garbage collector ran."""
    gc.collect()
    gc.disable()
    try:
        model = Decoder(CONFIG)
        parameters = [weakref.ref(x) for x in model.parameters()]
        del model
        assert not [x for x in parameters if x() is not None]
    finally:
        gc.enable()


def test_copies_reset_their_weight_after_the_original_is_gone():
    original = Decoder(CONFIG)
    copies = copy.deepcopy(original), pickle.loads(pickle.dumps(original))
    del original
    for model in copies:
        model.embedding.weight.data.fill_(math.nan)
        model.embedding.reset_parameters()
        assert model.embedding.weight.isfinite().all()


def test_a_reset_of_a_deleted_module_raises():
    reset_parameters = Decoder(CONFIG).embedding.reset_parameters
    gc.collect()
    with pytest.raises(ReferenceError, match=r"^reset_parameters: its module must exist, got a deleted one"):
        reset_parameters()


def test_empty_weights_of_accelerate_and_a_file(tmp_path):
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    plain = Decoder(CONFIG)
    plain.save(tmp_path)
    with init_empty_weights():
        ours = Decoder(CONFIG)
    assert all(x.is_meta for x in ours.parameters())
    ours = load_checkpoint_and_dispatch(ours, str(tmp_path / "model.safetensors"), device_map={"": "cpu"})
    ids = torch.randint(256, (1, 20))
    assert torch.equal(ours(ids)[0], plain(ids)[0])


def test_decays_are_marked_for_optimizers():
    """Parameters with the usual attribute `_no_weight_decay` keep it in copies, files and `to_empty`."""

    def decays(module):
        return [x for name, x in module.named_parameters() if name.endswith(("A_log", "dt_bias"))]

    layer = layers.KimiDeltaAttention(48, 2, head_dim=16)
    with torch.device("meta"):
        empty = layers.KimiDeltaAttention(48, 2, head_dim=16)
    loaded = copy.deepcopy(empty)
    loaded.load_state_dict(layer.state_dict(), assign=True)
    for module in (layer, copy.deepcopy(layer), loaded, empty.to_empty(device="cpu"), layer.double()):
        assert len(decays(module)) == 2 and all(x._no_weight_decay for x in decays(module))
    others = [x for x in layer.parameters() if hasattr(x, "_no_weight_decay")]
    assert len(others) == 2


def spread_of(model):
    whole = {name: getattr(x, "full_tensor", lambda x=x: x)().detach() for name, x in model.named_parameters()}
    assert all(x.isfinite().all() for x in whole.values())
    return {name: x.std().item() for name, x in whole.items() if x.numel() >= 300}


def sharded_from_meta(given, group):
    """FSDP2: shard on the meta device, materialise, reset."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = Decoder(CONFIG)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators may not", UserWarning)  # each process draws its own
        reset(model)
    found = spread_of(model)
    assert found.keys() == given.keys()
    for name, spread in given.items():
        assert found[name] == spread == 0 or 0.8 < found[name] / spread < 1.25, name
    assert model(torch.randint(256, (1, 9)))[0].isfinite().all()


CASES = {"sharded from meta": Case(lambda: spread_of(Decoder(CONFIG)), sharded_from_meta)}


@pytest.mark.long
def test_a_decoder_sharded_on_the_meta_device_is_new(tmp_path):
    assert not failures_on_ranks([1, 2], tmp_path, __name__, "CASES")
