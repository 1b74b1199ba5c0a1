"""Modules and functions under fla's names that are compositions in PyTorch: norms with a gate, and RWKV-7's pieces.

Truth is PyTorch's own layer in float64, or the formula.
"""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import wyfold
from wyfold.integrations import fla
from wyfold.integrations.fla import gated_norms, pieces, recurrences, rwkv7_pieces
from wyfold.integrations.fla.pieces import causal_conv1d_update

B, T, D = 2, 5, 24
F64 = torch.float64


def drawn(*shape: int, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(*(shape or (B, T, D)), dtype=F64).to(dtype)


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gated_norms_are_pytorchs(kind: str, activation: str, float64_bounds: Any):
    """With a residual, whose sum is returned, and their gradients."""
    given = [x.requires_grad_() for x in (drawn(), drawn(), drawn(D), drawn(D), drawn())]
    x, g, weight, bias, residual = given
    total = x + residual
    normed = F.layer_norm(total, (D,), None, None, 1e-5) if kind == "layer" else F.rms_norm(total, (D,), None, 1e-5)
    expected = (normed * weight + bias) * (g.sigmoid() if activation == "sigmoid" else F.silu(g)), total
    found = getattr(gated_norms, f"{kind}_norm_gated")(x, g, weight, bias, activation, residual, True, eps=1e-5)
    incoming = [drawn(), drawn()]
    for name, y, z in zip(("y", "total"), found, expected, strict=True):
        float64_bounds.output(name, y.detach(), z.detach())
    gradients = [torch.autograd.grad(y, given, incoming) for y in (found, expected)]
    for place, (dx, truth) in enumerate(zip(*gradients, strict=True)):
        float64_bounds.gradient(f"gradient {place}", dx, truth)


def test_modules_with_a_gated_norm_are_its_functions():
    x, g, residual, out = drawn(), drawn(), drawn(), drawn(7, D)
    norm = gated_norms.FusedLayerNormGated(D, bias=True, activation="sigmoid", dtype=F64)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    assert torch.equal(norm(x, g), gated_norms.layer_norm_gated(x, g, norm.weight, norm.bias, "sigmoid", eps=1e-5))
    norm.reset_parameters()
    plain = gated_norms.FusedLayerNormGated(D, elementwise_affine=False, bias=True, activation="sigmoid")
    assert torch.equal(norm(x, g), plain(x, g)) and not list(plain.parameters())
    for kind in ("Layer", "RMS"):
        whole = getattr(gated_norms, f"Fused{kind}NormSwishGateLinear")(D, dtype=F64)
        part = getattr(gated_norms, f"{kind.lower()}_norm_gated")
        y, total = part(x, g, whole.weight, None, "swish", residual, True, eps=1e-5)
        found = whole(x, g, out, drawn(7).zero_(), residual=residual, prenorm=True)
        assert torch.equal(found[0], y @ out.T) and torch.equal(found[1], total)
        assert [name for name, _ in whole.named_parameters()] == ["weight"]
        assert whole(x.bfloat16(), g.bfloat16(), out).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="activation must be one of"):
        gated_norms.FusedLayerNormGated(D, activation="gelu")


def test_the_gated_norm_without_eps(float64_bounds: Any):
    """As in fla: no kernel, and a row of zeros is NaN."""
    x, g = drawn(), drawn()
    norm = fla.FusedRMSNormGated(D, eps=0, dtype=F64)
    expected = x / x.square().mean(-1, keepdim=True).sqrt() * F.silu(g)
    float64_bounds.output("y", norm(x, g).detach(), expected)
    x[0, 0] = 0
    assert bool(norm(x, g)[0, 0].isnan().all()) and not bool(norm(x, g)[0, 1:].isnan().any())
    kept = [norm(x.bfloat16(), g.bfloat16(), prenorm=True, residual_in_fp32=wide)[1].dtype for wide in (False, True)]
    assert kept == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("rms", [False, True])
def test_norms_of_groups(rms: bool, before: bool, float64_bounds: Any):
    x, z, weight, bias = drawn(), drawn(), drawn(D), drawn(D)
    found = gated_norms.layernorm_fn(x, weight, bias, z, 1e-5, 8, before, rms)
    y = (x if before else x * F.silu(z)).unflatten(-1, (3, 8))
    y = F.rms_norm(y, (8,), None, 1e-5) if rms else F.layer_norm(y, (8,), None, None, 1e-5)
    y = y.flatten(-2) * weight + bias
    float64_bounds.output("y", found, y * F.silu(z) if before else y)
    ours = gated_norms.rmsnorm_fn if rms else gated_norms.layernorm_fn
    plain = F.rms_norm(x, (D,), weight, 1e-5) if rms else F.layer_norm(x, (D,), weight, None, 1e-5)
    float64_bounds.output("plain", ours(x, weight, None, eps=1e-5), plain)


def test_wrong_calls_are_refused():
    x, g, weight = drawn(), drawn(), drawn(D)
    narrow = [drawn(B, T, 1, D).to(dtype) for dtype in (torch.float32, torch.float8_e4m3fn, torch.float32)]
    for message, call in (
        ("eps must be at least 0", lambda: gated_norms.layer_norm_gated(x, g, weight, None, eps=-1.0)),
        ("g and residual must be", lambda: gated_norms.layer_norm_gated(x, g[:1], weight, None)),
        ("activation must be one of", lambda: gated_norms.layer_norm_gated(x, g, weight, None, "gelu")),
        ("multiple of group_size = 7", lambda: gated_norms.layernorm_fn(x, weight, None, group_size=7)),
        ("x and z must be", lambda: gated_norms.layernorm_fn(x, weight, None, g[:1])),
        ("x must be", lambda: causal_conv1d_update(x, drawn(B, D, 4), weight=drawn(D, 4))),
        ("x must have 3", lambda: rwkv7_pieces.channel_mixing_rwkv7(x[0], x[:, 0], weight, weight, weight)),
        ("weight must be", lambda: gated_norms.layer_norm_gated(x, g, weight[:1], None)),
        ("x must be float", lambda: fla.RMSNorm(D)(x.int())),
        ("x must be", lambda: fla.RMSNorm(D)(x[..., 1:])),
        ("residual must be", lambda: fla.RMSNorm(D)(x, x[:1])),
        ("g must be float", lambda: gated_norms.rms_norm_gated(x, g.int(), weight, None, prenorm=True)),
        ("x and z must be", lambda: gated_norms.layernorm_fn(x[0, 0, 0], weight, None)),
        ("weight must have 2", lambda: pieces.causal_conv1d(x, drawn(D), output_final_state=True)),
        ("x must have 3", lambda: pieces.causal_conv1d(x[0], drawn(D, 4), output_final_state=True)),
        ("g must be", lambda: pieces.chunk_scaled_dot_kkt_fwd(x[:, :, None], x[:, :1, :1], x[..., :1])),
        ("chunk_size must be", lambda: pieces.chunk_scaled_dot_kkt_fwd(x[:, :, None], *[x[..., :1]] * 2, None, 0)),
        ("k must be float", lambda: recurrences.fused_recurrent_delta_rule(*narrow)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    words: Any = ["one", "two"]
    for message, call in (
        ("weight must be", lambda: causal_conv1d_update(x, drawn(B, D, 4))),
        ("residual must be", lambda: gated_norms.rms_norm_gated(x, g, weight, None, residual=words)),
        ("prenorm must be", lambda: gated_norms.rms_norm_gated(x, g, weight, None, prenorm=words)),
        ("x must be", lambda: gated_norms.layernorm_fn(words, weight, None)),
        ("residual must be", lambda: fla.RMSNorm(D)(x, words)),
        ("prenorm must be", lambda: fla.RMSNorm(D)(x, None, words)),
        ("x must be", lambda: pieces.causal_conv1d(words, drawn(D, 4), output_final_state=True)),
        ("cu_seqlens must be", lambda: pieces.causal_conv1d(x, drawn(D, 4), None, None, None, True, cu_seqlens=words)),
        ("output_final_state must be", lambda: pieces.causal_conv1d(x, drawn(D, 4), output_final_state=words)),
        ("A must be", lambda: pieces.solve_tril(words, output_dtype=None)),
        ("g must be", lambda: pieces.chunk_scaled_dot_kkt_fwd(x[:, :, None], words, x[..., :1])),
        ("states must be True", lambda: recurrences.chunk_kda(x, x, x, x, x, return_intermediate_states=words)),
        ("use_gate_in_kernel must be", lambda: recurrences.fused_recurrent_gdn(x, x, x, use_gate_in_kernel=words)),
    ):
        with pytest.raises(TypeError, match=message):
            call()


@pytest.mark.parametrize("form", ["N D", "1 N D", "N 1 D"])
def test_the_convolution_of_one_token_moves_its_cache(form: str, float64_bounds: Any):
    x, weight, bias, residual = drawn(), drawn(D, 4), drawn(D), drawn()
    cache = torch.zeros(B, D, 4, dtype=F64)
    expected = wyfold.causal_conv1d(x, weight, bias, residual=residual, activation="silu")[0]
    shape = {"N D": (B, D), "1 N D": (1, B, D), "N 1 D": (B, 1, D)}[form]
    for t in range(T):
        y, moved = causal_conv1d_update(
            x[:, t].reshape(shape), cache, residual[:, t].reshape(shape), weight, bias, "silu"
        )
        assert moved is cache and y.shape == shape
        float64_bounds.output(f"token {t}", y.reshape(B, D), expected[:, t])
    assert torch.equal(cache, x[:, -4:].mT)


@pytest.mark.parametrize("gate", [False, True])
def test_mixes_of_rwkv7(gate: bool):
    h, delta = (drawn(dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    weights = [drawn(1, 1, D, dtype=torch.bfloat16) for _ in range(5 + gate)]
    found = rwkv7_pieces.fused_addcmul_rwkv7(h, delta, *weights)
    assert len(found) == 6 and (found[5] is None) == (not gate)
    for y, x in zip(found, weights, strict=False):
        assert y is not None and torch.equal(y, (h.double() + delta.double() * x.double()).bfloat16())
    # Six gradients are added in float32, and rounded once.
    dh, ddelta = torch.autograd.grad(
        [y for y in found if y is not None], (h, delta), [torch.ones_like(h)] * len(weights)
    )
    assert torch.equal(dh, torch.full_like(h, len(weights)))
    exact = sum(x.double() for x in weights).expand_as(h)
    assert torch.equal(ddelta, exact.float().bfloat16())


def test_keys_and_output_of_rwkv7(float64_bounds: Any):
    k, a, ka = drawn(), drawn(), drawn(D)
    expected = k * (1 - ka) + k * a * ka
    for found in (rwkv7_pieces.fused_k_rwkv7(k, a, ka, torch.tensor([0, T])), rwkv7_pieces.k_update_ref(k, a, ka)):
        float64_bounds.output("k", found, expected)
    H = 3
    r, k, v = (drawn(B, T, H, D // H) for _ in range(3))
    o, g, r_k = drawn(), drawn(), drawn(H, D // H)
    own = torch.einsum("bthd,bthd,hd,bthv->bthv", r, k, r_k, v)
    found = rwkv7_pieces.gate_output_correction(o, r, k, r_k, v, g)
    float64_bounds.output("o", found, (o + own.flatten(-2)) * g)


@pytest.mark.parametrize("rank", [2, 3])
def test_channel_mixing_of_rwkv7(rank: int, float64_bounds: Any):
    x, x_k, key, value = drawn(), drawn(1, 1, D), drawn(D, 9), drawn(9, D)
    x_prev = drawn(B, D) if rank == 2 else drawn(B, 1, D)
    y, last = rwkv7_pieces.channel_mixing_rwkv7(x, x_prev, x_k, key, value)
    before = torch.stack([x_prev.reshape(B, D), *x.unbind(1)[:-1]], 1)
    float64_bounds.output("y", y, ((1 - x_k) * x + x_k * before).matmul(key).relu().square() @ value)
    assert torch.equal(last, x[-1])
    assert torch.equal(y, rwkv7_pieces.channel_mixing_rwkv7_torch(x, x_prev, x_k, key, value)[0])
