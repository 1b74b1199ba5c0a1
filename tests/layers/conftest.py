"""Small mixers for the tests of layers, with parameters moved away from their special initial values."""

import importlib.util
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn

from wyfold import SequenceLayout, reference
from wyfold.layers import (
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    KimiDeltaAttention,
    PaTHAttention,
    RWKV7TimeMix,
    SoftmaxAttention,
    TTTLinear,
)

WIDTH = 24  # hidden_size of them all

# Grouped value heads, and values narrower than keys, if the layer supports them.
MIXERS: dict[str, Callable[[], nn.Module]] = {
    "delta_net": lambda: DeltaNet(WIDTH, 2, 4, 16, 8, allow_neg_eigval=True),
    "gated_delta_net": lambda: GatedDeltaNet(WIDTH, 2, 4, 16, 8),
    "kda": lambda: KimiDeltaAttention(WIDTH, 2, 4, 16, 8, conv_size=3),
    "kda_bounded": lambda: KimiDeltaAttention(WIDTH, 2, 2, 8, 16, lower_bound=-5.0),
    "gated_delta_net2": lambda: GatedDeltaNet2(WIDTH, 2, 4, 16, 8),
    "gated_delta_product": lambda: GatedDeltaProduct(WIDTH, 2, 4, 16, 8),
    "gla": lambda: GatedLinearAttention(WIDTH, 2, 4, 16, 8, decay_rank=4),
    "gla_conv": lambda: GatedLinearAttention(WIDTH, 2, 4, 16, 8, short_conv=3),
    "rwkv7": lambda: RWKV7TimeMix(WIDTH, 2, 16, 8, decay_rank=4),
    "ttt_linear": lambda: TTTLinear(WIDTH, 2, 4, 16),
    "path": lambda: PaTHAttention(WIDTH, 4, 2, 8, use_forget_gate=True),
    "attention": lambda: SoftmaxAttention(WIDTH, 4, 2, 8),
    "window": lambda: SoftmaxAttention(WIDTH, 4, 2, 8, window=5),
}


@pytest.fixture
def build() -> Callable[[str, torch.dtype], nn.Module]:
    """`build(name, dtype)`: a mixer by name, with every parameter perturbed at random."""

    def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
        layer = MIXERS[name]().to(dtype)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        return layer

    return build


@pytest.fixture(params=MIXERS)
def mixer(request: pytest.FixtureRequest, build: Callable[..., nn.Module]) -> nn.Module:
    """Each mixer in turn, float64."""
    return build(request.param)


@pytest.fixture(params=MIXERS)
def mixer32(request: pytest.FixtureRequest, build: Callable[..., nn.Module]) -> nn.Module:
    """Each mixer in turn, float32."""
    return build(request.param, torch.float32)


@pytest.fixture
def projected() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """`projected(layer, x, layout)`: q, k, v in heads, computed from the layer's parameters by the reference."""

    def projected(layer: nn.Module, x: torch.Tensor, layout: SequenceLayout | None) -> tuple[torch.Tensor, ...]:
        qkv = x @ layer.qkv.weight.T
        qkv, _ = reference.causal_conv1d(qkv, layer.conv.weight, activation="silu", cu_seqlens=layout)
        q, k, v = qkv.split([layer.key_size, layer.key_size, layer.value_size], -1)
        q, k = (part.unflatten(-1, (layer.num_heads, -1)) for part in (q, k))
        return q, k, v.unflatten(-1, (layer.num_v_heads, -1))

    return projected


@pytest.fixture
def same_gradients(float64_bounds) -> Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Check that two outputs of a layer have equal gradients with respect to x and every parameter."""

    def same_gradients(layer: nn.Module, x: torch.Tensor, got: torch.Tensor, truth: torch.Tensor) -> None:
        arguments = {"x": x, **dict(layer.named_parameters())}
        arrow = torch.randn_like(truth)
        pairs = (torch.autograd.grad(y, list(arguments.values()), arrow, retain_graph=True) for y in (got, truth))
        for name, mine, true in zip(arguments, *pairs, strict=True):
            assert true.abs().max() > 0, f"{name}: a gradient of zero shows nothing"
            float64_bounds.gradient(name, mine, true)

    return same_gradients


@pytest.fixture
def transformers() -> ModuleType:
    """The transformers package, skipped unless its layers run on the CPU."""
    if importlib.util.find_spec("fla") is not None:
        pytest.skip("where fla is installed, layers of transformers call its kernels, which read a GPU's memory alone")
    return pytest.importorskip("transformers", reason="transformers is not installed")
