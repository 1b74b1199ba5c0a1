"""Layers as one autograd function: the output and the gradients of their modules."""

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from wyfold import SequenceLayout
from wyfold.autograd.mixer import Mixer
from wyfold.layers import GatedDeltaNet, KimiDeltaAttention
from wyfold.reference import error
from wyfold.runtime import replay_cache

MADE: dict[str, Callable[[], nn.Module]] = {
    "GDN": lambda: GatedDeltaNet(24, 1, 2, 16, backend="triton"),
    "GDN, packed": lambda: GatedDeltaNet(24, 1, 1, 8, 24, allow_neg_eigval=True, backend="triton"),
    "KDA, packed": lambda: KimiDeltaAttention(24, 2, 2, 16, backend="triton"),
    "KDA, bounded": lambda: KimiDeltaAttention(24, 1, 1, 16, lower_bound=-5.0, backend="triton"),
    "GDN, bfloat16": lambda: GatedDeltaNet(24, 1, 2, 128, backend="triton"),
    "KDA, bfloat16": lambda: KimiDeltaAttention(24, 1, 1, 128, backend="triton"),
}


@pytest.fixture
def as_one_function(device: torch.device) -> Iterator[None]:
    """Within, layers on the device are called as one function."""
    with mock.patch.object(replay_cache, "DEVICES", frozenset((device.type,))):
        yield


def function_of(y: Tensor) -> str:
    return type(y.grad_fn).__name__


def differentiated(layer: nn.Module, x: Tensor, dy: Tensor, layout: SequenceLayout | None = None, **kept: bool) -> Any:
    """y, and the gradients of x and of the parameters that have one, by name."""
    parameters = {"x": x} | dict(layer.named_parameters())
    leaves = {name: leaf for name, leaf in parameters.items() if leaf.requires_grad}
    y = layer(x, layout=layout)
    return y, dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy, **kept), strict=True))


def draw(made: str, B: int, T: int, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    layer, dtype = MADE[made]().to(device), torch.bfloat16 if "bfloat16" in made else torch.float32
    for name, parameter in layer.named_parameters():
        if "decay_parameters" not in name:
            parameter.data = parameter.to(dtype)
    x, dy = torch.randn(2, B, T, 24, device=device).to(dtype)
    return layer, x.requires_grad_(), dy


@pytest.mark.parametrize("made", MADE)
def test_one_function_computes_what_the_modules_do(made: str, device: torch.device, request: Any):
    packed = "packed" in made
    layer, x, dy = draw(made, *((1, 80) if packed else (2, 70)), device)
    layout = SequenceLayout(torch.tensor([0, 30, 30, 77], device=device), 80) if packed else None
    wide = copy.deepcopy(layer).double()
    for module in wide.modules():
        module.backend = "eager"
    y, truth = differentiated(wide, x.detach().double().requires_grad_(), dy.double(), layout)
    truth |= {"y": y}
    with mock.patch.object(replay_cache, "DEVICES", frozenset()):
        y, yardstick = differentiated(layer, x, dy, layout)
        assert function_of(y) != "MixerBackward"
        yardstick |= {"y": y}
    request.getfixturevalue("as_one_function")
    y, got = differentiated(layer, x, dy, layout)
    assert function_of(y) == "MixerBackward"
    got |= {"y": y}
    error.require(*[error.judge(got[name], x, yardstick[name], name=name) for name, x in truth.items()])


def test_a_graph_that_is_kept_is_read_again(device: torch.device, as_one_function: None):
    """A backward that keeps the graph writes over nothing, and has the bits of one that does not."""
    layer, x, dy = draw("GDN", 1, 20, device)
    leaves, y = (x, *layer.parameters()), layer(x)
    kept = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for _ in range(2)]
    last = torch.autograd.grad(y, leaves, dy)
    for other in (kept[1], last):
        assert all(map(torch.equal, kept[0], other))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("by", ["is_grads_batched", "vmap", "vmap of vmap"])
def test_a_batch_of_gradients(by: str, device: torch.device, as_one_function: None):
    """Its members are differentiated one after another, from the same saved tensors."""
    layer, x, dy = draw("GDN", 1, 20, device)
    leaves, members = (x, *layer.parameters()), torch.stack([dy, dy.flip(1)])
    wanted = [torch.autograd.grad(layer(x), leaves, member) for member in members]
    y = layer(x)
    gradients = lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True)
    if by == "is_grads_batched":
        found = torch.autograd.grad(y, leaves, members, is_grads_batched=True)
    elif by == "vmap":
        found = torch.func.vmap(gradients, in_dims=2)(members.movedim(0, 2))
        empty = torch.func.vmap(gradients)(members[:0])
        assert [dx.shape for dx in empty] == [(0, *leaf.shape) for leaf in leaves]
    else:
        found = [dx[:, 0] for dx in torch.func.vmap(torch.func.vmap(gradients))(members[:, None])]
    for dx, *separate in zip(found, *wanted, strict=True):
        assert torch.equal(dx, torch.stack(separate))


def test_tensors_that_a_hook_gets_are_not_written_over(device: torch.device, as_one_function: None):
    layer, x, dy = draw("GDN", 1, 20, device)
    saved: list[tuple[Tensor, Tensor]] = []

    def pack(x: Tensor) -> Tensor:
        saved.append((x, x.detach().clone()))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = layer(x)
    torch.autograd.grad(y, x, dy)
    assert saved and all(torch.equal(x, before) for x, before in saved)


@pytest.mark.parametrize("frozen", ["x", "qkv.weight", "decay_parameters.A_log", "norm.weight", "out.weight"])
def test_gradients_that_are_not_needed(frozen: str, device: torch.device, as_one_function: None):
    layer, x, dy = draw("GDN", 1, 20, device)
    _, wanted = differentiated(layer, x, dy)
    dict(layer.named_parameters(), x=x)[frozen].requires_grad_(False)
    y, found = differentiated(layer, x, dy)
    assert function_of(y) == "MixerBackward"
    assert found.keys() == wanted.keys() - {frozen}
    assert all(torch.equal(dx, wanted[name]) for name, dx in found.items())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant: bool, device: torch.device, as_one_function: None):
    layer, x, dy = draw("GDN", 1, 20, device)
    _, wanted = differentiated(layer, x, dy)
    leaves = [x, *layer.parameters()]
    checkpoint(layer, x, use_reentrant=use_reentrant).backward(dy)
    assert all(torch.equal(leaf.grad, dx) for leaf, dx in zip(leaves, wanted.values(), strict=True))


def test_sharded_parameters(device: torch.device, as_one_function: None):
    """Of FSDP2, which gathers the parameters around the layer's forward and frees them behind it."""
    layer, x, dy = draw("GDN", 1, 20, device)
    layer(x).backward(dy)
    wanted = {name: leaf.grad for name, leaf in layer.named_parameters()}
    sharded, whole = copy.deepcopy(layer), mock.Mock(wraps=Mixer.forward)
    sharded.zero_grad()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh(device.type, (1,))
        fully_shard(sharded.decay_parameters, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        for _ in range(2):
            sharded.zero_grad()
            with mock.patch.object(Mixer, "forward", whole):
                y = sharded(x)
            y.backward(dy)
        found = {name: leaf.grad.full_tensor() for name, leaf in sharded.named_parameters()}
    finally:
        torch.distributed.destroy_process_group()
    assert whole.call_count == 2
    assert all(torch.equal(found[name], dx) for name, dx in wanted.items())


def test_modes_and_transforms(device: torch.device, as_one_function: None):
    """Autocast, compilers and transforms of torch.func see the modules."""
    layer, x, _ = draw("GDN", 1, 20, device)
    whole = mock.Mock(wraps=Mixer.forward)
    with mock.patch.object(Mixer, "forward", whole):
        with torch.autocast(device.type, torch.bfloat16):
            layer(x)
        torch.compile(layer, backend="eager", fullgraph=True)(x)
        with pytest.raises(RuntimeError, match=r"transform of torch\.func"):
            torch.func.grad(lambda x: layer(x).sum())(x)
        assert not whole.called
        layer(x)
        assert whole.called


class _Wrapped(Tensor):
    """A subclass of Tensor, as that of a distributed or a quantized parameter."""


class _Adapted(nn.Linear):
    """A projection that does more than its class."""


def _hooked(layer: Any) -> None:
    layer.gate.register_forward_hook(lambda *_: None)


def _replaced(layer: Any) -> None:
    layer.qkv.__class__ = _Adapted


def _wrapped(layer: Any) -> None:
    layer.gate.weight = nn.Parameter(layer.gate.weight.detach().as_subclass(_Wrapped))


def _biased(layer: Any) -> None:
    layer.out.bias = nn.Parameter(torch.zeros_like(layer.out.weight[:, 0]))


def _frozen(layer: Any) -> None:
    layer.requires_grad_(False)


def _computing(layer: Any) -> None:
    chunk, recurrent = layer.operators
    layer.operators = (lambda *rows, **options: chunk(*rows, **options)), recurrent


def _reading_out(layer: Any) -> None:
    layer.read_out = type(layer).read_out.__get__(layer)


def _normalising(layer: Any) -> None:
    layer.norm.backend = "eager"


CHANGES = (_hooked, _replaced, _wrapped, _biased, _frozen, _computing, _reading_out, _normalising)


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_are_more_than_their_parameters_run_as_modules(
    change: Callable[[Any], None], device: torch.device, as_one_function: None
):
    layer, x, _ = draw("GDN", 1, 20, device)
    assert function_of(layer(x)) == "MixerBackward"
    change(layer)
    assert function_of(layer(x.detach())) != "MixerBackward"


def test_errors_are_those_of_the_modules(device: torch.device, as_one_function: None):
    layer, x, _ = draw("GDN", 1, 20, device)
    for wrong in (x[0], x[..., :8], x.double(), x.long()):
        with mock.patch.object(replay_cache, "DEVICES", frozenset()), pytest.raises((TypeError, ValueError)) as modules:
            layer(wrong)
        with pytest.raises(modules.type) as found:
            layer(wrong)
        assert str(found.value) == str(modules.value)
