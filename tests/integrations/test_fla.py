"""fla's names call Wyfold's operators with fla's argument order; the stand-in shadows another fla only by force."""

import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold.integrations import fla
from wyfold.integrations.fla import pieces
from wyfold.integrations.fla import stand_in as stand_in_of
from wyfold.layers import GatedRMSNorm

T, H, HV, K, V = 21, 2, 4, 16, 24

# Positional parameters of fla-core 0.6.0, in order.
ORDER = {
    "chunk_delta_rule": """q k v beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens
        cu_seqlens_cpu""",
    "fused_recurrent_delta_rule": """q k v beta scale initial_state output_final_state use_qk_l2norm_in_kernel
        cu_seqlens""",
    "chunk_gated_delta_rule": """q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel
        use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context""",
    "fused_recurrent_gated_delta_rule": """q k v g gk gv beta scale initial_state output_final_state
        use_qk_l2norm_in_kernel use_gate_in_kernel A_log dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval
        state_v_first cu_seqlens""",
    "chunk_kda": """q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel
        use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states
        state_v_first cu_seqlens cu_seqlens_cpu cp_context use_graph max_num_seqs""",
    "fused_recurrent_kda": """q k v g beta A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel
        use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens""",
    "chunk_ttt_linear": """q k v w b eta scale eps chunk_size initial_state initial_state_bias output_final_state
        cu_seqlens cu_seqlens_cpu""",
    "fused_chunk_ttt_linear": """q k v w b eta scale eps chunk_size initial_state initial_state_bias output_final_state
        cu_seqlens""",
    "parallel_path_attn": "q k v w beta g scale cu_seqlens use_cache",
    "l2norm": "x eps output_dtype",
    "rms_norm_gated": "x g weight bias activation residual prenorm residual_in_fp32 eps",
    "causal_conv1d": """x weight bias residual initial_state output_final_state activation backend cu_seqlens
        cu_seqlens_cpu chunk_indices cp_context""",
    "solve_tril": "A cu_seqlens chunk_indices output_dtype",
    "chunk_scaled_dot_kkt_fwd": "k g beta cu_seqlens chunk_size output_dtype chunk_indices",
    "fused_gdn_gate": "g A_log dt_bias output_dtype",
    "fused_kda_gate": "g A_log dt_bias lower_bound output_dtype",
    "ShortConvolution": "hidden_size kernel_size bias activation backend device dtype",
    "ShortConvolution.forward": "self x residual mask cache output_final_state cu_seqlens chunk_indices",
    "ShortConvolution.step": "self x residual cache output_final_state cu_seqlens",
    "FusedRMSNormGated": "hidden_size elementwise_affine eps activation device dtype",
    "FusedRMSNormGated.forward": "self x g residual prenorm residual_in_fp32",
    "L2Norm": "eps output_dtype",
}


@pytest.mark.parametrize("name", ORDER)
def test_arguments_come_in_flas_order(name: str):
    function: Any = fla
    for part in name.split("."):
        function = getattr(function, part)
    expected = ORDER[name].split()
    assert list(inspect.signature(function).parameters)[: len(expected)] == expected


# --- operators -------------------------------------------------------------------------------------------------------


def tensors(*, packed: bool = False) -> dict[str, Tensor]:
    """Arguments of one call, with a state for each sequence."""
    B = 1 if packed else 2
    rows = {name: torch.randn(B, T, heads, width) for name, heads, width in [("q", H, K), ("k", H, K), ("v", HV, V)]}
    gates = {"g": -torch.rand(B, T, HV), "gk": -torch.rand(B, T, HV, K), "beta": torch.rand(B, T, HV)}
    parameters = {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV)}
    return {**rows, **gates, **parameters, "S0": torch.randn(2, HV, K, V), "cu": torch.tensor([0, 9, T])}


def alike(found: Any, expected: Any) -> bool:
    """Check equality of bits, tensor by tensor; None must match None."""
    if expected is None or found is None:
        return found is expected
    if isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(alike, found, expected))
    return torch.equal(found, expected)


FLAGS = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_delta_rules_are_wyfolds(form: str, packed: bool):
    x = tensors(packed=packed)
    cu = x["cu"] if packed else None
    q, k, v, g, gk, beta, S0 = (x[name] for name in ("q", "k", "v", "g", "gk", "beta", "S0"))
    given = {"scale": 0.5, "initial_state": S0, "cu_seqlens": cu, **FLAGS}
    for rule, gates in [("delta_rule", ()), ("gated_delta_rule", (g,)), ("kda", (gk,))]:
        theirs, ours = getattr(fla, f"{form}_{rule}"), getattr(wyfold, f"{form}_{rule}")
        expected = ours(q, k, v, *gates, beta, **given)
        assert alike(theirs(q, k, v, *gates, beta=beta, **given), expected), rule
        assert alike(theirs(q, k, v, *gates, beta=beta, **{**given, "output_final_state": False})[1], None)


def token_loop(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """The delta rule on states that decay by exp(decay), [B, T, HV, K, V]."""
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    outputs = []
    for t in range(T):
        S = S * decay[:, t].exp()
        error = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], error)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * K**-0.5)
    return torch.stack(outputs, 1), S


@pytest.mark.parametrize("names", [("gv",), ("g", "gv"), ("g", "gk", "gv")], ids=" ".join)
def test_a_decay_per_value_channel(names: tuple[str, ...], float64_bounds: Any):
    x = {name: y.double() for name, y in (tensors() | {"gv": -torch.rand(2, T, HV, V)}).items() if name != "cu"}
    x["k"] = wyfold.l2norm(x["k"])
    x = {name: y.requires_grad_() for name, y in x.items() if name in ("q", "k", "v", "beta", "S0", *names)}
    apart = {"g": (..., None, None), "gk": (..., None), "gv": (..., None, slice(None))}
    decay = sum(x[name][apart[name]] for name in names).expand(2, T, HV, K, V)
    truth = token_loop(x["q"], x["k"], x["v"], decay, x["beta"], x["S0"])
    found = fla.fused_recurrent_gated_delta_rule(
        *(x[name] for name in ("q", "k", "v")),
        **{name: x[name] for name in names},
        beta=x["beta"],
        initial_state=x["S0"].mT,
        output_final_state=True,
        state_v_first=True,
    )
    found = found[0], found[1].mT
    incoming = [torch.randn_like(y) for y in truth]
    for name, y, z in zip(("o", "state"), found, truth, strict=True):
        float64_bounds.output(name, y.detach(), z.detach())
    grads = (torch.autograd.grad(y, list(x.values()), incoming) for y in (found, truth))
    for name, dx, true in zip(x, *grads, strict=True):
        float64_bounds.gradient(f"d{name}", dx, true)


@pytest.mark.parametrize("rule, gate", [("delta_rule", None), ("gated_delta_rule", "g"), ("kda", "gk")])
def test_different_dtypes_token_by_token(rule: str, gate: str | None):
    """The widest computes. The output is rounded to the dtype in which fla returns it."""
    x = tensors()
    q, k, v, beta = x["q"], x["k"].bfloat16(), x["v"].half().requires_grad_(), x["beta"]
    gates = () if gate is None else (x[gate],)
    o, state = getattr(fla, f"fused_recurrent_{rule}")(q, k, v, *gates, beta=beta, output_final_state=True)
    wide = getattr(wyfold, f"fused_recurrent_{rule}")(
        q, k.float(), v.float(), *gates, beta=beta, output_final_state=True
    )
    assert torch.equal(o, wide[0].to(torch.float32 if gate is None else torch.float16))
    assert o.dtype == (q if gate is None else v).dtype and torch.equal(state, wide[1])
    o.sum().backward()
    assert v.grad.dtype == torch.float16


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("lengths", [None, [0, 40, 32, 28]], ids=["dense", "packed"])
def test_states_that_enter_each_chunk(lengths: list[int] | None, v_first: bool, float64_bounds: Any):
    B, tokens, C = (1, 100, 32) if lengths else (2, 70, 32)
    q, k, v = (torch.randn(B, tokens, n, d).double() for n, d in ((H, K), (H, K), (HV, V)))
    g, beta = -torch.rand(B, tokens, HV, K).double(), torch.rand(B, tokens, HV).double()
    S0 = torch.randn(len(lengths or (1, 1)), HV, *((V, K) if v_first else (K, V))).double()
    options = {"output_final_state": True, "state_v_first": v_first, "use_qk_l2norm_in_kernel": True, "chunk_size": C}
    cu = torch.tensor([0, *lengths]).cumsum(0) if lengths else None
    o, state, h = fla.chunk_kda(
        q, k, v, g, beta, initial_state=S0, cu_seqlens=cu, return_intermediate_states=True, **options
    )
    assert alike((o, state), fla.chunk_kda(q, k, v, g, beta, initial_state=S0, cu_seqlens=cu, **options))
    rows = [x.split(lengths, 1) for x in (q, k, v, g, beta)] if lengths else [x.split(1) for x in (q, k, v, g, beta)]
    expected = []
    for i, row in enumerate(zip(*rows, strict=True)):
        for start in range(0, row[0].shape[1], C):
            before = fla.chunk_kda(*(x[:, :start] for x in row), initial_state=S0[i : i + 1], **options)[1]
            expected.append(before)
    float64_bounds.output("h", h.flatten(0, 1), torch.cat(expected))
    assert h.shape[:2] == ((1, 4) if lengths else (2, 3))
    none = fla.chunk_kda(q.half(), k.half(), v.half(), g, beta, cu_seqlens=cu, return_intermediate_states=True)
    assert none[1] is None and none[2].dtype == torch.float16 and not none[2][:, 0].any()


@pytest.mark.parametrize("packed", [False, True])
def test_path_attention_is_wyfolds(packed: bool):
    """With fla's meaning of the gate, which the softmax scale multiplies."""
    x = tensors(packed=packed)
    q, v, g, beta = torch.randn(len(x["q"]), T, HV, K), x["v"][:, :, :H], x["g"], x["beta"][:, :, :H]
    w, cu = wyfold.l2norm(torch.randn_like(x["k"])), x["cu"] if packed else None
    expected = wyfold.parallel_path_attn(q, x["k"], v, w, beta, g, scale=0.3, cu_seqlens=cu, use_cache=True)
    assert alike(fla.parallel_path_attn(q, x["k"], v, w, beta, g, 0.3, cu, True), expected)
    assert alike(fla.parallel_path_attn(q, x["k"], v, w, beta, g, 0.3, cu), (expected[0], None))


@pytest.mark.parametrize("n", [1, 3])
def test_the_product_is_wyfolds_in_flas_order(n: int):
    q, g, S0 = torch.randn(1, T, H, K), -torch.rand(1, T, HV), torch.randn(2, HV, K, V)
    k, v, beta = torch.randn(1, n * T, H, K), torch.randn(1, n * T, HV, V), torch.rand(1, n * T, HV)
    cu = torch.tensor([0, 9, T])
    given = {"scale": 0.5, "initial_state": S0, "use_qk_l2norm_in_kernel": True, **FLAGS}
    expected = wyfold.chunk_gated_delta_product(q, k, v, g, beta, n, cu_seqlens=cu, cu_seqlens_cpu=cu, **given)
    needless = {"chunk_indices": torch.zeros(2, 2), "chunk_indices_dp": torch.zeros(2, 2)}
    assert alike(fla.chunk_gated_delta_product(q, k, v, g, beta, n, 0.5, S0, True, True, cu, cu, **needless), expected)
    with pytest.raises(TypeError, match=r"cp_context must come from .*build_cp_context, got int"):
        fla.chunk_gated_delta_product(q, k, v, g, beta, n, cp_context=1)


def test_gates_and_layouts_inside_are_wyfolds():
    x = tensors()
    q, k, v, g, gk, beta = (x[name] for name in ("q", "k", "v", "g", "gk", "beta"))
    inside = {"use_gate_in_kernel": True, "A_log": x["A_log"], **FLAGS}
    logits = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "state_v_first": True, **FLAGS}
    bounded = {**inside, "lower_bound": -5.0, "dt_bias": torch.randn(HV * K)}
    for form in ("chunk", "fused_recurrent"):
        for rule, gate, options in [
            ("gated_delta_rule", g, {**inside, "dt_bias": x["dt_bias"]}),
            ("gated_delta_rule", g, logits),
            ("kda", gk, logits),
            ("kda", gk, bounded),
        ]:
            theirs, ours = getattr(fla, f"{form}_{rule}"), getattr(wyfold, f"{form}_{rule}")
            expected = ours(q, k, v, gate, beta, **options)
            assert alike(theirs(q, k, v, gate, beta=beta, **options), expected), (form, rule, options)
    safe = {"safe_gate": True, "lower_bound": -2.0, "chunk_size": 32, "disable_recompute": True}
    needless = {"use_graph": True, "max_num_seqs": 4, "chunk_indices": torch.zeros(1, 2)}
    expected = wyfold.chunk_kda(q, k, v, 4 * gk, beta, **safe)
    assert alike(fla.chunk_kda(q, k, v, 4 * gk, beta, **safe, **needless), expected)


def test_a_decay_per_channel_makes_the_recurrent_form_kda():
    x = tensors()
    q, k, v, g, gk, beta = (x[name] for name in ("q", "k", "v", "g", "gk", "beta"))
    for both, decay in (({}, gk), ({"g": g}, gk + g[..., None])):
        found = fla.fused_recurrent_gated_delta_rule(q, k, v, gk=gk, beta=beta, output_final_state=True, **both)
        assert alike(found, wyfold.fused_recurrent_kda(q, k, v, decay, beta, output_final_state=True))


def test_ttt_is_wyfolds():
    q, k, v = (torch.randn(1, T, H, K) for _ in range(3))
    w, b, eta = torch.randn(H, K), torch.randn(H, K), torch.rand(1, T, H, 1)
    states = torch.randn(2, H, K, K), torch.randn(2, H, 1, K)
    cu = torch.tensor([0, 9, T])
    found = fla.chunk_ttt_linear(q, k, v, w, b, eta, 0.5, 1e-5, 16, *states, True, cu, cu)
    expected = wyfold.chunk_ttt_linear(
        q,
        k,
        v,
        w,
        b,
        eta,
        scale=0.5,
        eps=1e-5,
        initial_state=states[0],
        initial_state_bias=states[1],
        output_final_state=True,
        cu_seqlens=cu,
    )
    assert alike(found, expected)
    assert fla.fused_chunk_ttt_linear is fla.chunk_ttt_linear


def test_gradients_pass():
    x = {name: t.requires_grad_() for name, t in tensors().items() if t.is_floating_point()}
    given = x["q"], x["k"], x["v"], x["gk"], x["beta"]
    o, state = fla.chunk_kda(*given, initial_state=x["S0"], output_final_state=True)
    (o.sum() + state.sum()).backward()
    assert all(bool(t.grad.any()) for t in (*given, x["S0"]))


def test_old_name_of_the_state_layout():
    x = tensors()
    given = x["q"], x["k"], x["v"], x["g"]
    for call in (fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule):
        with pytest.warns(DeprecationWarning, match="state_v_first"):
            _, state = call(*given, beta=x["beta"], output_final_state=True, transpose_state_layout=True)
        assert state.shape[-2:] == (V, K)
        with pytest.raises(ValueError, match="transpose_state_layout, got both"):
            call(*given, beta=x["beta"], state_v_first=True, transpose_state_layout=False)
        with pytest.raises(TypeError, match="transpose_state_layout must be True or False, got 1"):
            call(*given, beta=x["beta"], transpose_state_layout=1)


def test_unsupported_arguments_are_refused():
    x = tensors()
    q, k, v, g, gk, beta = (x[name] for name in ("q", "k", "v", "g", "gk", "beta"))
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "cp_context must come from", lambda: fla.chunk_kda(q, k, v, gk, beta, cp_context=1)),
        (TypeError, "cp_context must come from", lambda: fla.chunk_gated_delta_rule(q, k, v, g, beta, cp_context=1)),
        (ValueError, r"`chunk_size` must be either 32 or 64 .* got 16", lambda: fla.chunk_kda(
            q, k, v, gk, beta, chunk_size=16
        )),
        (TypeError, "prenorm must be", lambda: fla.rms_norm_gated(v, v, None, None, prenorm=1)),
        # fla accepts and ignores these.
        (ValueError, "A_log must come with", lambda: fla.chunk_gated_delta_rule(q, k, v, g, beta, A_log=x["A_log"])),
        (ValueError, "A_log must come with", lambda: fla.fused_recurrent_kda(q, k, v, gk, beta, x["A_log"])),
        (ValueError, "lower_bound must come with", lambda: fla.chunk_kda(q, k, v, gk, beta, lower_bound=-5.0)),
        (ValueError, "gk must come with", lambda: fla.fused_recurrent_gated_delta_rule(
            q, k, v, gk=gk, use_gate_in_kernel=True
        )),
        (ValueError, "beta must be", lambda: fla.fused_recurrent_gated_delta_rule(q, k, v, gv=v, beta=beta[:, 1:])),
        (TypeError, "outputfinalstate", lambda: fla.chunk_kda(q, k, v, gk, beta, outputfinalstate=True)),
        (TypeError, "head_first", lambda: fla.chunk_gated_delta_rule(q, k, v, g, beta, head_first=True)),
        (ValueError, "beta must be given", lambda: fla.chunk_scaled_dot_kkt_fwd(k)),
    ]  # fmt: skip
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("packed", [False, True])
def test_kkt_takes_sums_to_base_two(packed: bool, float64_bounds: Any):
    T, C = 70, 16
    lengths = [37, 33] if packed else [T]
    k, g, beta = (x.double() for x in (torch.randn(1, T, H, K), -torch.rand(1, T, HV), torch.rand(1, T, HV)))
    sums = [part.cumsum(1) for row in g.split(lengths, 1) for part in row.split(C, 1)]
    cu = torch.tensor([0, *lengths]).cumsum(0) if packed else None
    found = fla.chunk_scaled_dot_kkt_fwd(k, torch.cat(sums, 1) / math.log(2), beta, cu, C, torch.float64)
    expected = wyfold.chunk_scaled_dot_kkt(k, beta, g, chunk_size=C, cu_seqlens=cu)
    float64_bounds.output("J", found, expected)
    # A chunk's first decay cancels in J; a large one must not cost accuracy.
    float64_bounds.output("g", pieces.per_token(torch.cat(sums, 1) / math.log(2), cu, C), g)
    plain = fla.chunk_scaled_dot_kkt_fwd(k, None, beta, cu, C, torch.float64)
    assert torch.equal(plain, wyfold.chunk_scaled_dot_kkt(k, beta, chunk_size=C, cu_seqlens=cu))


def test_small_functions_are_wyfolds():
    x, g = torch.randn(3, HV, K), torch.randn(3, 5, HV, K)
    A_log, bias = torch.randn(HV), torch.randn(HV * K)
    assert torch.equal(fla.l2norm(x, 1e-3, torch.float64), wyfold.l2norm(x, 1e-3, torch.float64))
    assert torch.equal(fla.L2Norm(1e-3)(x), wyfold.l2norm(x, 1e-3))
    assert torch.equal(fla.fused_kda_gate(g, A_log, bias, -5.0), wyfold.fused_kda_gate(g, A_log, bias, -5.0))
    assert torch.equal(fla.fused_gdn_gate(g[..., 0], A_log), wyfold.fused_gdn_gate(g[..., 0], A_log))
    A = torch.randn(1, 32, H, 16)
    assert torch.equal(fla.solve_tril(A), wyfold.solve_tril(A))
    assert fla.solve_tril(A.bfloat16(), output_dtype=None).dtype == torch.bfloat16


# --- modules ---------------------------------------------------------------------------------------------------------


def test_the_convolution_continues_from_its_cache():
    D, W = 6, 4
    conv = fla.ShortConvolution(D, W, bias=True)
    assert {name: list(p.shape) for name, p in conv.named_parameters()} == {"weight": [D, 1, W], "bias": [D]}
    x = torch.randn(2, T, D)
    whole, state = conv(x, output_final_state=True)
    assert torch.equal(whole, wyfold.causal_conv1d(x, conv.weight[:, 0], conv.bias, activation="silu")[0])
    assert torch.equal(state, x[:, -W:].transpose(1, 2))
    with torch.no_grad():
        first, cache = conv(x[:, :9], output_final_state=True)
        steps = [conv(x[:, t : t + 1], cache=cache, output_final_state=True) for t in range(9, T)]
    assert torch.equal(torch.cat([first, *(y for y, _ in steps)], 1), whole)
    assert all(latest is cache for _, latest in steps), "a step writes the cache in place"
    with torch.no_grad():
        y, latest = conv.step(x[:, :1], x[:, :1], cache.clone(), output_final_state=True)
        same_y, same = conv(x[:, :1], x[:, :1], cache=cache.clone(), output_final_state=True)
        assert torch.equal(y, same_y) and latest is not None and torch.equal(latest, same)
        assert torch.equal(conv.step(x[:, :1], None, None)[0], whole[:, :1])
    with pytest.raises(ValueError, match=r"step: x must have one token of each sequence, got \[2, 2, 6\]"):
        conv.step(x[:, :2], None, cache)
    for call in (lambda: conv.step("x", None, cache), lambda: conv("x", cache=cache)):  # type: ignore[arg-type]
        with torch.no_grad(), pytest.raises(TypeError, match=r"ShortConvolution: x must be a torch\.Tensor, got str"):
            call()
    before = cache.clone()
    conv(x[:, :1], cache=cache, output_final_state=True)
    conv(x[:, :2], cache=cache)
    assert torch.equal(cache, before), "a call that is no step, or keeps gradients, does not"
    assert conv.state_size == D * W and conv(x)[1] is None


def test_the_convolution_of_packed_sequences():
    D, W = 6, 3
    conv, x, cu = fla.ShortConvolution(D, W, activation=None), torch.randn(1, T, D), torch.tensor([0, 9, T])
    packed, states = conv(x, cu_seqlens=cu, output_final_state=True)
    alone = [conv(part, output_final_state=True) for part in x.split([9, T - 9], 1)]
    assert torch.equal(packed, torch.cat([y for y, _ in alone], 1))
    assert torch.equal(states, torch.cat([state for _, state in alone]))
    with torch.no_grad():  # one token of each
        cache = states.clone()
        y, latest = conv(x[:, :2], cache=cache, cu_seqlens=torch.tensor([0, 1, 2]), output_final_state=True)
        apart = [conv(x[:, i : i + 1], cache=states[i : i + 1])[0] for i in range(2)]
    assert latest is cache and torch.equal(y, torch.cat(apart, 1))
    with pytest.raises(ValueError, match="mask must come without cu_seqlens"):
        conv(x, mask=torch.ones(1, T), cu_seqlens=cu)


def test_the_convolutions_mask_leaves_its_input_alone():
    conv, x = fla.ShortConvolution(6, 4), torch.randn(2, T, 6)
    mask, before = torch.ones(2, T), x.clone()
    mask[1, :5] = 0
    y, _ = conv(x, residual=x, mask=mask)
    assert torch.equal(x, before)
    assert torch.equal(y, conv(x * mask[..., None], residual=x)[0])
    with pytest.raises(ValueError, match="activation must be one of"):
        fla.ShortConvolution(6, 4, activation="gelu")
    with pytest.raises(ValueError, match="kernel_size must be one of"):
        fla.ShortConvolution(6, 9)


def test_the_gated_norm_is_wyfolds():
    x, g = torch.randn(2, T, HV, V), torch.randn(2, T, HV, V)
    theirs, ours = fla.FusedRMSNormGated(V, activation="sigmoid"), GatedRMSNorm(V, eps=1e-5, activation="sigmoid")
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(theirs(x, g), ours(x, g))
    theirs.reset_parameters()
    assert torch.equal(theirs(x, g), fla.FusedRMSNormGated(V, elementwise_affine=False, activation="sigmoid")(x, g))
    with pytest.raises(ValueError, match="activation must be one of"):
        fla.FusedRMSNormGated(V, activation="gelu")


# --- the stand-in ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_real_fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide any installed fla, and restore the module table afterwards."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "fla" else find(name, *a))
    yield
    fla.uninstall()
    assert "fla" not in sys.modules


def test_the_stand_in_has_flas_modules(no_real_fla: None):
    with fla.install() as stand_in:
        for path, names in stand_in_of.MODULES.items():
            module = importlib.import_module(path)
            assert all(getattr(module, name) is thing for name, thing in names.items()), path
        import fla.modules.l2norm as l2
        from fla.ops.utils import solve_tril

        root = sys.modules["fla"]
        assert root.__version__ == "0.6.0+wyfold" and root.__spec__.name == "fla"
        assert root.ops.kda.chunk_kda is fla.chunk_kda and l2.l2norm is fla.l2norm and solve_tril is fla.solve_tril
        assert set(stand_in.modules) >= {name for name in sys.modules if name.partition(".")[0] == "fla"}
        assert fla.install() is stand_in
    with pytest.raises(ImportError):
        importlib.import_module("fla.ops.kda")


def test_missing_names_are_import_errors(no_real_fla: None):
    with fla.install():
        with pytest.raises(ImportError, match="chunk_mesa_net"):
            from fla.ops import chunk_mesa_net  # noqa: F401
        with pytest.raises(ImportError, match=r"fla\.layers has no mamba2"):
            importlib.import_module("fla.layers.mamba2")


def test_a_real_fla_is_shadowed_by_force_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("real = True")
    (tmp_path / "fla" / "ops.py").write_text("real = True")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=rf"{re.escape(str(tmp_path / 'fla'))}.*, and is not shadowed unasked"):
        fla.install()
    real = importlib.import_module("fla.ops")
    with pytest.raises(ImportError, match="not shadowed unasked"):
        fla.install()
    with fla.install(force=True):
        assert not hasattr(importlib.import_module("fla.ops"), "real")
    assert importlib.import_module("fla.ops") is real
    for name in ("fla", "fla.ops"):
        del sys.modules[name]
    with pytest.raises(TypeError, match="force must be True or False"):
        fla.install(force=1)  # type: ignore[arg-type]
    fla.uninstall()


def test_a_folder_of_that_name_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "fla").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # a regular package elsewhere would take precedence
    importlib.invalidate_caches()
    with pytest.raises(ImportError, match=rf"importable, {re.escape(str(tmp_path / 'fla'))}, "):
        fla.install()


OWN_NAMES = {
    *("StandIn", "install", "uninstall"),
    *("Acceleration", "Report", "accelerate"),
    *("FlaCheckpoint", "from_fla", "to_fla"),
}
"""Names of the package that fla does not have."""


def test_the_migration_table_names_existing_objects(no_real_fla: None):
    """Every old name is in the stand-in, equals the drop-in of its row, and has a new name."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(fla\.[\w.]+)` \| `(\w+)` \| `((?:wyfold|torch)\.[\w.]+)` \|$", page, re.M)
    assert {name for _, name, _ in rows} == set(fla.__all__) - OWN_NAMES
    with fla.install():
        for old, name, new in rows:
            module, _, attribute = old.rpartition(".")
            assert getattr(importlib.import_module(module), attribute) is getattr(fla, name), old
            found: Any = {"wyfold": wyfold, "torch": torch}
            for part in new.split("."):
                found = found[part] if isinstance(found, dict) else getattr(found, part)


def test_names_that_the_page_lists_as_missing_are_missing(no_real_fla: None):
    """So that the page stays up to date; its names are those of fla-core 0.6.0."""
    page = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
    table = page.partition("### Not there yet")[2].partition("| module |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines()[2:]]
    assert len(rows) > 12
    with fla.install():
        for modules, names in rows:
            for module in re.findall(r"`(fla[\w.]+)`", modules):
                if names.strip().startswith("all") and "but" not in names:
                    with pytest.raises(ImportError):
                        importlib.import_module(module)
                    continue
                found, listed = importlib.import_module(module), names.replace("all but `solve_tril`", "")
                for name in re.findall(r"`(\w[\w.]*)`", listed):
                    owner, _, method = name.rpartition(".")
                    assert not hasattr(getattr(found, owner) if owner else found, method), (module, name)
