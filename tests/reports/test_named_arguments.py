"""Errors named an argument that the caller had not passed.

Boundaries passed as `cu_seq_lens_q` were called `cu_seqlens`. `model(..., cu_seqlens=)` ended in "multiple values for
keyword argument". `decode_packed`, which takes `mixed_qkv`, complained about q. A second patch of a model type did not
report that the first one already serves its models, and `patch([])` replaced nothing.
"""

from typing import Any

import pytest
import torch
from tests.integrations.hybrids import hybrid
from torch import Tensor

from wyfold import serving
from wyfold.integrations import fla
from wyfold.integrations.transformers import patch

pytest.importorskip("transformers", reason="transformers is not installed")

T = 9
IDS = torch.randint(64, (1, T), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def qwen() -> Any:
    return hybrid("qwen3_5")


def cu(*bounds: int) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"cu_seq_lens_q": cu(0, 5, 3, T)}, "cu_seq_lens_q must not decrease"),
        ({"cu_seq_lens_q": cu(1, T)}, "cu_seq_lens_q must begin with 0"),
        ({"cu_seq_lens_q": cu(0, T + 1)}, f"cu_seq_lens_q must end at most at T = {T}, got {T + 1}"),
        ({"cu_seq_lens_q": torch.tensor([0.0, T])}, "cu_seq_lens_q must be int32 or int64, got float32"),
        ({"cu_seq_lens_q": cu(0, T)[None]}, r"cu_seq_lens_q must be \[N[+]1\]"),
        ({"cu_seqlens": cu(0, 4, T)}, "boundaries must be given as cu_seq_lens_q, got cu_seqlens"),
        ({"cu_seq_lens_k": cu(0, 4, T)}, "boundaries must be given as cu_seq_lens_q, got cu_seq_lens_k alone"),
        ({"cu_seq_lens_q": cu(0, 4, T), "cu_seq_lens_k": cu(0, 5, T)}, "cu_seq_lens_k must have the boundaries of"),
        (
            {"cu_seq_lens_q": cu(0, 4, T), "seq_idx": torch.zeros(1, T, dtype=torch.int32)},
            "seq_idx must have the boundaries of cu_seq_lens_q, got 1 documents and 2",
        ),
        (
            {
                "seq_idx": torch.zeros(1, T, dtype=torch.int32),
                "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]),
            },
            "position_ids must begin again where seq_idx has a boundary",
        ),
    ],
)
def test_boundaries_have_the_callers_name_in_errors(qwen: Any, inputs: dict[str, Tensor], message: str):
    with patch(qwen), pytest.raises(ValueError, match=rf"^patch\(qwen3_5\): {message}"):
        qwen(IDS, **inputs)


def test_boundaries_that_are_no_tensor_are_a_type_error(qwen: Any):
    with patch(qwen):
        for name in ("cu_seq_lens_q", "seq_idx"):
            with pytest.raises(TypeError, match=rf"^patch\(qwen3_5\): {name} must be a torch.Tensor, got list"):
                qwen(IDS, **{name: [0, 4, T]})


@pytest.mark.parametrize("nothing", [[], ()])
def test_no_names_are_refused(nothing: Any):
    with pytest.raises(ValueError, match=r"^patch: target must name at least one type, got .*; types are qwen3_next"):
        patch(nothing)


def test_a_second_patch_joins_the_first(qwen: Any):
    """With two models of a type, both patches hold in either order of `undo`; each counts the calls while it holds."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    before = dict(vars(module)), dict(vars(module.Qwen3_5TextModel))
    for first_out in (0, 1):
        patches = [patch(qwen)]
        with torch.no_grad():
            qwen(IDS)
            patches.append(patch("qwen3_5"))
            qwen(IDS)
            left = patches.pop(first_out)
            counted = left.undo().served
            qwen(IDS)
        held = patches.pop().undo()
        assert left.report.served == counted == (4, 8)[first_out == 0] and held.served == (8, 12)[first_out == 1]
        assert held.replaced == left.report.replaced
        assert (dict(vars(module)), dict(vars(module.Qwen3_5TextModel))) == before


@pytest.mark.parametrize("other", [{"packing": False}, {"norm": True}, {"on_unsupported": "stock"}])
def test_a_second_patch_with_other_options_names_those_of_the_first(qwen: Any, other: dict[str, Any]):
    (name, value), first = *other.items(), {"packing": True, "norm": False, "on_unsupported": "raise"}
    message = (
        f"^patch: {name} must be {first[name]!r} for qwen3_5, got {value!r}; an earlier patch holds and serves every"
    )
    with patch(qwen), pytest.raises(ValueError, match=message):
        patch("qwen3_5", **other)
    patch("qwen3_5", **other).undo()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mixed_qkv": torch.zeros(3, 192, dtype=torch.int32)}, "mixed_qkv must be float"),
        ({"mixed_qkv": torch.zeros(3, 192, requires_grad=True)}, "mixed_qkv must not require"),
        ({"raw_g": torch.zeros(3, 4, requires_grad=True)}, "raw_g must not require"),
        ({"raw_g": torch.zeros(3, 4, dtype=torch.int32)}, "raw_g must be float"),
        ({"raw_beta": torch.zeros(3, 4, requires_grad=True)}, "raw_beta must not require"),
        ({"raw_beta": torch.zeros(3, 4, dtype=torch.int32)}, "raw_beta must be float"),
        ({"raw_g": torch.zeros(3, 4, device="meta")}, "raw_g must have the device of mixed_qkv, cpu"),
        ({"pool": torch.zeros(8, 4, 16, 32, device="meta")}, "pool must have the device of mixed_qkv, cpu"),
        ({"out": torch.zeros(3, 4, 32, dtype=torch.float16)}, "out must have the dtype of mixed_qkv, float32"),
        ({"heads": (3, 4), "mixed_qkv": torch.zeros(3, 224)}, "heads must have a multiple of the 3 heads of q and k"),
        ({"dims": (12, 32), "mixed_qkv": torch.zeros(3, 176)}, "dims must have width K a multiple of 8"),
    ],
)
def test_decode_packed_names_its_own_arguments(change: dict[str, Any], message: str):
    inputs: dict[str, Any] = {
        "mixed_qkv": torch.randn(3, 2 * 2 * 16 + 4 * 32), "raw_g": torch.randn(3, 4), "raw_beta": torch.randn(3, 4),
        "A_log": torch.zeros(4), "dt_bias": None, "pool": torch.zeros(8, 4, 16, 32),
    }  # fmt: skip
    sizes = {"heads": (2, 4), "dims": (16, 32), "state_v_first": False}
    with pytest.raises(ValueError, match=f"^decode_packed: {message}"):
        serving.decode_packed(**{**inputs, **sizes, **change})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.randn(2, 8, 15)}, r"x must be \[B, T, D\] = \[B, T, 16\]"),
        ({"cache": torch.zeros(3, 16, 4)}, r"cache must be \[N, D, W\] = \[2, 16, 4\]"),
        ({"cache": torch.zeros(2, 16, 4, dtype=torch.int32)}, "cache must be float"),
        ({"mask": torch.ones(2, 7)}, r"mask must be \[B, T\] = \[2, 8\]"),
        ({"mask": torch.ones(2, 1)}, r"mask must be \[B, T\] = \[2, 8\]"),
    ],
)
def test_the_convolution_under_flas_name_names_its_own_arguments(change: dict[str, Any], message: str):
    """Errors named `weight` and `initial_state` of another operator; a mask of one column was broadcast."""
    with pytest.raises(ValueError, match=f"^ShortConvolution: {message}"):
        fla.ShortConvolution(16, 4)(**{"x": torch.randn(2, 8, 16), **change})


@pytest.mark.parametrize(
    "gk, message",
    [
        (torch.zeros(1, 8, 2), r"gk must have 4 dimensions, \[B, T, HV, K\]"),
        (torch.zeros(1, 8, 2, 16, dtype=torch.int32), "gk must be float"),
        ([1], "gk must be a torch.Tensor, got list"),
    ],
)
def test_a_decay_per_channel_under_flas_name_is_called_gk(gk: Any, message: str):
    """Passed in place of beta, as Wyfold's own operator takes it, it caused PyTorch's error about broadcasting."""
    q, beta = torch.randn(1, 8, 2, 16), torch.rand(1, 8, 2)
    with pytest.raises((TypeError, ValueError), match=f"^fused_recurrent_gated_delta_rule: {message}"):
        fla.fused_recurrent_gated_delta_rule(q, q, q, -beta, gk, None, beta)


def test_a_decoder_that_is_already_divided_is_refused_as_such():
    """The message claimed that its layers, which it listed, are not of the delta family."""
    from types import SimpleNamespace

    from wyfold.integrations.dtensor import Parted, parallelize
    from wyfold.models import Decoder, DecoderConfig

    model = Decoder(
        DecoderConfig(vocab_size=16, hidden_size=16, num_layers=1, pattern="gdn", options={"gdn": {"num_heads": 1}})
    )
    part = Parted.__new__(Parted)
    torch.nn.Module.__init__(part)
    model.blocks[0].mixer = part
    with pytest.raises(
        ValueError, match=r"^parallelize: model must be whole, got one that an earlier call has divided"
    ):
        parallelize(model, SimpleNamespace(ndim=1, size=lambda: 1))
