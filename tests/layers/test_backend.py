"""A layer passes its backend to every operator, in every form of the call.

The dispatch table is made to treat CPU tensors as CUDA tensors, where eager never runs without a demand. A call that
runs has therefore demanded a backend for every operator.
"""

import pytest
import torch

from wyfold import SequenceLayout, UnsupportedError, layers

SIZES = {"hidden_size": 24, "num_heads": 2, "head_dim": 16}
# layer -> its operators other than the convolution, over all forms of its call
MIXERS = {
    layers.DeltaNet: ("chunk_delta_rule", "fused_recurrent_delta_rule"),
    layers.GatedDeltaNet: ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "rms_norm_gated"),
    layers.KimiDeltaAttention: ("chunk_kda", "fused_recurrent_kda", "rms_norm_gated"),
    layers.PaTHAttention: ("parallel_path_attn", "l2norm"),
    layers.RWKV7TimeMix: ("chunk_rwkv7", "fused_recurrent_rwkv7", "l2norm"),
    layers.TTTLinear: ("chunk_ttt_linear", "fused_recurrent_ttt_linear"),
}


@pytest.mark.parametrize("kind", MIXERS)
def test_every_operator_of_a_mixer_gets_the_backend(kind, planned_as_cuda):
    x = torch.randn(1, 40, 24, requires_grad=True)
    layer, cache = kind(**SIZES, backend="eager"), layers.LayerCache()
    layer(x).sum().backward()
    layer(x, layout=SequenceLayout.from_lengths([7, 33]))
    for piece in x.split([33, 1, 6], dim=1):
        layer(piece, cache=cache)
    assert {operator for operator, _ in planned_as_cuda} == {"causal_conv1d", *MIXERS[kind]}
    assert {backend for _, backend in planned_as_cuda} == {"eager"}
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize("kind", MIXERS)
def test_without_a_backend_a_mixer_is_refused_with_a_remedy(kind, planned_as_cuda):
    layer = kind(**SIZES)
    with pytest.raises(UnsupportedError, match="no backend serves tensors on cuda") as refused:
        layer(torch.randn(1, 40, 24))
    assert 'backend="eager", an argument of every operator and of the layer' in refused.value.reasons["eager"]


def test_submodules_take_a_backend(planned_as_cuda):
    x = torch.randn(1, 9, 8)
    layers.ShortConvolution(8, backend="eager")(x)
    layers.GatedRMSNorm(8, backend="eager")(x, x)
    assert planned_as_cuda == [("causal_conv1d", "eager"), ("rms_norm_gated", "eager")]


@pytest.mark.parametrize("kind", [*MIXERS, layers.ShortConvolution, layers.GatedRMSNorm])
def test_an_unknown_backend_is_refused_by_the_constructor(kind):
    sizes = SIZES if kind in MIXERS else {"channels": 8} if kind is layers.ShortConvolution else {"width": 8}
    with pytest.raises(ValueError, match=f"^{kind.__name__}: backend must be one of None, 'eager', .*, got 'cuda'"):
        kind(**sizes, backend="cuda")
