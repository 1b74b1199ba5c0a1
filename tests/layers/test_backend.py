"""The backend a layer was made with is what every operator in it is asked for, in every form of the call.

The table takes the CPU's tensors here for tensors on CUDA, where nothing is served unasked: what runs, asked for
everything it needs.
"""

import pytest
import torch

from wyfold import SequenceLayout, UnsupportedError, layers

SIZES = {"hidden_size": 24, "num_heads": 2, "head_dim": 16}
# layer: its operators beside the convolution, over all forms of its call
MIXERS = {
    layers.DeltaNet: ("chunk_delta_rule", "fused_recurrent_delta_rule"),
    layers.GatedDeltaNet: ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "rms_norm_gated"),
    layers.KimiDeltaAttention: ("chunk_kda", "fused_recurrent_kda", "rms_norm_gated"),
    layers.TTTLinear: ("chunk_ttt_linear", "fused_recurrent_ttt_linear"),
}


@pytest.mark.parametrize("kind", MIXERS)
def test_every_operator_of_a_mixer_is_asked(kind, planned_as_cuda):
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
def test_unasked_a_mixer_is_refused_with_what_to_do(kind, planned_as_cuda):
    layer = kind(**SIZES)
    with pytest.raises(UnsupportedError, match="no backend serves tensors on cuda") as refused:
        layer(torch.randn(1, 40, 24))
    assert 'backend="eager", an argument of every operator and of the layer' in refused.value.reasons["eager"]


def test_the_parts_take_one_too(planned_as_cuda):
    x = torch.randn(1, 9, 8)
    layers.ShortConvolution(8, backend="eager")(x)
    layers.GatedRMSNorm(8, backend="eager")(x, x)
    assert planned_as_cuda == [("causal_conv1d", "eager"), ("rms_norm_gated", "eager")]


@pytest.mark.parametrize("kind", [*MIXERS, layers.ShortConvolution, layers.GatedRMSNorm])
def test_a_backend_of_another_name_is_refused_when_the_layer_is_made(kind):
    sizes = SIZES if kind in MIXERS else {"channels": 8} if kind is layers.ShortConvolution else {"width": 8}
    with pytest.raises(ValueError, match=f"^{kind.__name__}: backend must be one of None, 'eager', .*, got 'cuda'"):
        kind(**sizes, backend="cuda")
