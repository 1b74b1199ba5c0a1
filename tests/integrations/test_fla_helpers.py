"""fla's helpers of the stand-in: indices, decorators, references, autograd functions, norm and network."""

from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold.integrations import fla
from wyfold.integrations.fla import environment, functions, indices, modules, naive

B, T, H, HV, K, V = 2, 21, 2, 4, 16, 24
CU = torch.tensor([0, 5, 5, 12, 20], dtype=torch.int32)


# --- indices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_cpu", [None, CU])
def test_indices_number_tokens_and_chunks(on_cpu: Tensor | None):
    lens = [5, 0, 7, 8]
    assert indices.prepare_lens(CU).tolist() == lens
    positions = indices.prepare_position_ids(CU, on_cpu)
    assert positions.dtype == CU.dtype and positions.tolist() == [*range(5), *range(7), *range(8)]
    # As in fla: a sequence without tokens is not counted here, but is in the indices of chunks.
    sequences = [0] * 5 + [1] * 7 + [2] * 8
    assert indices.prepare_sequence_ids(CU, on_cpu).tolist() == sequences
    assert indices.prepare_token_indices(CU, on_cpu).T.tolist() == [sequences, positions.tolist()]
    chunks = [[0, 0], [0, 1], [2, 0], [2, 1], [3, 0], [3, 1]]
    assert indices.prepare_chunk_indices(CU, 4, on_cpu).tolist() == chunks
    assert indices.prepare_chunk_offsets(CU, 4).tolist() == [0, 2, 2, 4, 6]
    fixed, offsets = indices.prepare_chunk_indices_static(CU, 4, 8)
    assert fixed.tolist() == [*chunks, [-1, 0], [-1, 0]] and offsets.tolist() == [0, 2, 2, 4, 6]
    assert indices.get_max_num_splits(CU, 4, on_cpu) == 2


def test_boundaries_come_from_lengths_masks_and_parts():
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    assert indices.prepare_lens_from_mask(mask).tolist() == [2, 1]
    found = indices.prepare_cu_seqlens_from_mask(mask)
    assert found.tolist() == [0, 2, 3] and found.dtype == torch.int32
    assert indices.prepare_cu_seqlens_from_lens(torch.tensor([3, 4]), torch.int64).dtype == torch.int64
    assert indices.prepare_split_cu_seqlens(2, 5, 3).tolist() == [0, 3, 5, 8, 10]
    assert indices.prepare_split_cu_seqlens(split_size=4, cu_seqlens=CU).tolist() == [0, 4, 5, 9, 12, 16, 20]
    with pytest.raises(TypeError, match="split_size must be given"):
        indices.prepare_split_cu_seqlens(2, 5)
    with pytest.raises(TypeError, match="batch_size and seq_len, must be given"):
        indices.prepare_split_cu_seqlens(split_size=3)
    for call in (indices.prepare_chunk_indices, indices.prepare_chunk_offsets):
        with pytest.raises(ValueError, match="chunk_size must be at least 1"):
            call(CU, 0)


# --- decorators and comparisons --------------------------------------------------------------------------------------


def test_the_guard_passes_contiguous_tensors():
    seen: list[Any] = []

    def record(x: Tensor, y: Tensor, *more: Any, z: Any = None) -> int:
        seen[:] = [x, y, *more, z]
        return 7

    strided = torch.zeros(3, 4).T
    assert environment.input_guard(record)(strided, strided, strided, 5, z=strided) == 7
    assert seen[3] == 5 and all(x.is_contiguous() for x in seen if isinstance(x, Tensor))
    environment.input_guard(no_guard_contiguous=["y"])(record)(strided, strided, z=strided)
    assert [x.is_contiguous() for x in seen] == [True, False, True]
    environment.input_guard(no_guard_contiguous=True)(record)(strided, strided)
    assert seen[0] is strided
    assert environment.contiguous(record).__name__ == "record"
    assert environment.tensor_cache(record) is record


def test_checkpoint_computes_again():
    calls = []

    def square(x: Tensor) -> Tensor:
        calls.append(1)
        return x**2

    x = torch.ones(3, requires_grad=True)
    environment.checkpoint(square)(x).sum().backward()
    assert len(calls) == 2 and torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


def test_autocast_decorators_make_an_autograd_function():
    class Doubled(torch.autograd.Function):
        @staticmethod
        @environment.autocast_custom_fwd
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        @environment.autocast_custom_bwd
        def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * dy

    x = torch.ones(3, requires_grad=True)
    Doubled.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


def test_comparison_raises_for_differences_and_nans():
    x, compare = torch.ones(10), environment.assert_close
    compare("o", x, x * 1.001, 0.002)
    with pytest.raises(AssertionError, match=r"o: differs by 0\.1"):
        compare("o", x, x * 1.1, 0.002)
    with pytest.raises(AssertionError, match="tri has a NaN"):
        compare("o", x, x * torch.nan, 0.002)
    with pytest.warns(UserWarning, match="differs by"):
        compare("o", x, x * 1.1, 0.002, warning=True)


def test_versions_compare_by_number():
    assert environment.check_pytorch_version("2.4") and not environment.check_pytorch_version("99.0")
    assert not environment.check_transformers_version("99")
    assert environment.find_spec_cached("torch") is not None
    assert environment.find_spec_cached("no_such_package.at_all") is None


# --- references ------------------------------------------------------------------------------------------------------


def tensors(heads: int = HV) -> dict[str, Tensor]:
    rows = {"q": torch.randn(B, T, H, K), "k": torch.randn(B, T, H, K) / 4, "v": torch.randn(B, T, heads, V)}
    return {**rows, "g": -torch.rand(B, T, heads), "gk": -torch.rand(B, T, heads, K), "beta": torch.rand(B, T, heads)}


def close(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).detach().abs().max()) < 2e-5 * max(1.0, float(expected.detach().abs().max()))


def test_references_agree_with_the_operators():
    x = tensors()
    S0, options = torch.randn(B, HV, K, V), {"output_final_state": True, "scale": 0.5}
    q, k, v, g, gk, beta = (x[name] for name in ("q", "k", "v", "g", "gk", "beta"))
    expected = wyfold.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=S0, **options)  # type: ignore[arg-type]
    for o, state in (
        naive.naive_recurrent_gated_delta_rule(q, k, v, beta, g, initial_state=S0, **options),  # type: ignore[arg-type]
        naive.naive_chunk_gated_delta_rule(q, k, v, g, beta, initial_state=S0, **options),  # type: ignore[arg-type]
    ):
        close(o, expected[0])
        close(state, expected[1])  # type: ignore[arg-type]
    by_channel = wyfold.chunk_kda(q, k, v, gk, beta, initial_state=S0, **options)  # type: ignore[arg-type]
    for o, state in (
        naive.naive_recurrent_kda(q, k, v, gk, beta, initial_state=S0, **options),  # type: ignore[arg-type]
        naive.naive_chunk_kda(q, k, v, gk, beta, initial_state=S0, **options),  # type: ignore[arg-type]
    ):
        close(o, by_channel[0])
        close(state, by_channel[1])  # type: ignore[arg-type]
    assert naive.naive_recurrent_kda(q, k, v.half(), gk, beta)[1] is None
    assert naive.naive_recurrent_kda(q, k, v.half(), gk, beta)[0].dtype == torch.float16
    with pytest.raises(ValueError, match="multiple of the 2 heads"):
        naive.naive_recurrent_kda(q, k, v[:, :, :3], gk[:, :, :3], beta[:, :, :3])


def test_delta_references_have_heads_before_tokens():
    x = tensors(H)
    q, k, v, beta = (x[name] for name in ("q", "k", "v", "beta"))
    o, state, *_ = wyfold.chunk_delta_rule(q, k, v, beta, output_final_state=True)
    turned = [y.transpose(1, 2) for y in (q, k, v, beta)]
    for found in (naive.delta_rule_recurrence(*turned), naive.delta_rule_chunkwise(*turned)):
        close(found[0].transpose(1, 2), o)
        close(found[1], state)  # type: ignore[arg-type]
    turned[3] = turned[3][..., None].expand(-1, -1, -1, V)
    close(naive.delta_rule_recurrence(*turned)[0].transpose(1, 2), o)


def test_gate_and_ttt_references_are_wyfolds():
    g, A_log, bias = torch.randn(B, T, HV, K), torch.randn(HV), torch.randn(HV * K)
    close(naive.naive_kda_gate(g, A_log, bias), wyfold.fused_kda_gate(g, A_log, bias))
    close(naive.naive_kda_lowerbound_gate(g, A_log, bias), wyfold.fused_kda_gate(g, A_log, bias, -5.0))
    close(naive.naive_gdn_gate(g[..., 0], A_log, bias[:HV]), wyfold.fused_gdn_gate(g[..., 0], A_log, bias[:HV]))
    q, k, v = (torch.randn(1, T, H, K) for _ in range(3))
    w, b = torch.randn(H, K), torch.randn(H, K)
    found = naive.chunk_ttt_linear_ref(q, k, v, w, b, 0.1, output_final_state=True)
    for ours, theirs in zip(found, fla.chunk_ttt_linear(q, k, v, w, b, 0.1, output_final_state=True), strict=True):
        close(ours, theirs)  # type: ignore[arg-type]


# --- autograd functions ----------------------------------------------------------------------------------------------


def test_a_state_without_rows_is_that_of_every_row_of_ttt():
    """fla's own tests pass the state of a single sequence so."""
    q, k, v = (torch.randn(B, T, H, K) for _ in range(3))
    w, b, state, bias = torch.ones(H, K), torch.zeros(H, K), torch.randn(H, K, K), torch.randn(H, 1, K)
    call = lambda state, bias: naive.chunk_ttt_linear_ref(
        q, k, v, w, b, 0.1, initial_state=state, initial_state_bias=bias, output_final_state=True
    )
    rows = (x.expand(B, *x.shape) for x in (state, bias))
    assert all(map(torch.equal, call(state, bias), call(*rows)))


def test_autograd_functions_are_the_operators():
    x = tensors()
    names = ("q", "k", "v", "g", "beta")
    S0, dS = torch.randn(B, HV, K, V), torch.randn(B, HV, K, V)
    x |= {"S0": S0}

    def gradients(call: Any) -> list[Tensor]:
        leaves = {name: x[name].clone().requires_grad_() for name in (*names, "S0")}
        o, state = call(leaves)
        (o.square().sum() + (state * dS).sum()).backward()
        return [o.detach(), state.detach(), *(leaf.grad for leaf in leaves.values())]

    def apply(t: dict[str, Tensor]) -> Any:
        given = (t["q"], t["k"], t["v"], t["g"], t["beta"], 0.5, t["S0"], True)
        return functions.ChunkGatedDeltaRuleFunction.apply(*given)

    def steps(t: dict[str, Tensor]) -> Any:
        given = (t["q"], t["k"], t["v"], t["g"], None, None, t["beta"], None, None, 0.5, t["S0"], True)
        return functions.FusedRecurrentFunction.apply(*given)

    for function, operator in (
        (apply, fla.chunk_gated_delta_rule),
        (steps, fla.fused_recurrent_gated_delta_rule),
    ):

        def call(t: dict[str, Tensor], operator: Any = operator) -> Any:
            given = (t["q"], t["k"], t["v"], t["g"])
            return operator(*given, beta=t["beta"], scale=0.5, initial_state=t["S0"], output_final_state=True)

        for found, expected in zip(gradients(function), gradients(call), strict=True):
            assert torch.equal(found, expected)


def test_the_convolutions_autograd_function():
    x, weight = torch.randn(1, T, 6, requires_grad=True), torch.randn(6, 4)
    y, state = functions.CausalConv1dFunction.apply(x, weight, None, None, None, False, "silu", torch.tensor([0, 9, T]))
    assert state is None
    y.square().sum().backward()
    again = x.detach().clone().requires_grad_()
    expected, _ = fla.causal_conv1d(again, weight, activation="silu", cu_seqlens=torch.tensor([0, 9, T]))
    expected.square().sum().backward()
    assert torch.equal(y, expected) and torch.equal(x.grad, again.grad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="at most 11 arguments are taken, got 12"):
        functions.CausalConv1dFunction.apply(x, weight, *[None] * 10)


# --- norm and network ------------------------------------------------------------------------------------------------


def test_the_norm_adds_a_residual_first():
    norm = modules.RMSNorm(K, bias=True, eps=1e-6)
    torch.nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    torch.nn.init.normal_(norm.bias)  # type: ignore[arg-type]
    x, residual = torch.randn(B, T, K), torch.randn(B, T, K)
    total = x + residual
    expected = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight + norm.bias
    y, kept = norm(x, residual=residual, prenorm=True)
    close(y, expected)
    assert torch.equal(kept, total) and torch.equal(norm(x, residual), y)
    half, wide = norm(x.bfloat16(), residual, prenorm=True)
    assert half.dtype == torch.bfloat16 and wide.dtype == torch.float32
    assert norm(x.bfloat16(), prenorm=True)[1].dtype == torch.bfloat16
    assert norm(x.bfloat16(), prenorm=True, residual_in_fp32=True)[1].dtype == torch.float32
    assert list(modules.RMSNorm(K, elementwise_affine=False).parameters()) == []
    norm.reset_parameters()
    assert bool((norm.weight == 1).all()) and not bool(norm.bias.any())  # type: ignore[union-attr]


def test_the_network_has_flas_width():
    mlp = modules.GatedMLP(96)
    assert mlp.intermediate_size == 256 and modules.GatedMLP(1000, 4).intermediate_size == 2816
    x = torch.randn(B, T, 96)
    expected = (
        torch.nn.functional.silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)
    ) @ mlp.down_proj.weight.T
    close(mlp(x, cu_seqlens=None), expected)
    with pytest.raises(wyfold.UnsupportedError, match="hidden_act='powlu' is not offered"):
        modules.GatedMLP(96, hidden_act="powlu")
