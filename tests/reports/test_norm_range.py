"""An eps below float32's range made a zero row NaN: `l2norm(torch.zeros(8), eps=1e-70)`.

Rows whose squares overflow become 0, as in `torch.nn.functional.normalize`; the docstrings state the limit.
"""

import pytest
import torch
from torch.nn import functional as F

import wyfold
from wyfold import serving

TOO_SMALL = 1e-70  # above 0 in Python's float and in float64, 0 in float32
INTERPRETED = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
"""The kernels' reciprocal root discards inf * 0, and numpy warns about it in the interpreter."""

LARGEST = 1.8e19  # length of a row whose sum of squares is still in float32's range

PROMISED = 1e-5
"""Relative error of outputs and states in float32 (docs/numerics.md)."""


def test_a_too_small_eps_of_l2norm_is_refused():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match=r"l2norm: eps must be at least 1.1754944e-38.*got 1e-70"):
            wyfold.l2norm(torch.zeros(8, dtype=dtype), eps=TOO_SMALL)


def test_a_too_small_eps_of_rms_norm_gated_is_refused():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"rms_norm_gated: eps must be at least 1.1754944e-38.*got 1e-70"):
        wyfold.rms_norm_gated(x, x, torch.ones(8), eps=TOO_SMALL)


@pytest.mark.parametrize("operator", [wyfold.chunk_ttt_linear, wyfold.fused_recurrent_ttt_linear])
def test_a_too_small_eps_of_ttt_linear_is_refused(operator):
    x, w = torch.zeros(1, 3, 1, 8), torch.ones(1, 8)
    with pytest.raises(ValueError, match=r"eps must be at least 1.1754944e-38.*got 1e-70"):
        operator(x, x, x, w, w, 0.1, eps=TOO_SMALL)


def test_a_too_small_eps_of_ttt_decode_is_refused():
    x, w, S, c = torch.zeros(1, 1, 1, 8), torch.ones(1, 8), torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 1, 8)
    pool = wyfold.TTTState(S, c, S.clone(), c.clone(), torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"ttt_decode: eps must be at least 1.1754944e-38.*got 1e-70"):
        serving.ttt_decode(x, x, x, w, w, 0.1, pool, eps=TOO_SMALL)


def test_float64_accepts_it():
    assert torch.equal(wyfold.l2norm(torch.zeros(8, dtype=torch.float64), eps=TOO_SMALL), torch.zeros(8).double())


def test_the_smallest_eps_keeps_a_zero_row_zero(backend: str, device: torch.device):
    eps = torch.finfo(torch.float32).smallest_normal
    x = torch.zeros(3, 8, device=device, requires_grad=True)
    y = wyfold.l2norm(x, eps, backend=backend)
    y.sum().backward()
    assert not y.any() and x.grad.isfinite().all()
    assert not wyfold.rms_norm_gated(x.detach(), x.detach(), x.new_ones(8).detach(), eps=eps, backend=backend).any()


@pytest.mark.parametrize("length", [LARGEST, 1e-30, 1e19, 1.0])
def test_rows_within_the_range_are_right(length: float, backend: str, device: torch.device):
    x = F.normalize(torch.randn(5, 16), dim=-1) * length
    wide = x.double()
    expected = wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    got = wyfold.l2norm(x.to(device), backend=backend).cpu()
    # 16 squares and their sum, a root, a reciprocal and two products, each rounded once.
    assert ((got.double() - expected).abs() <= 24 * 2.0**-24 * expected.abs()).all()


@INTERPRETED
def test_rows_beyond_the_range_are_zero_with_a_zero_gradient(backend: str, device: torch.device):
    x = (F.normalize(torch.randn(5, 16), dim=-1) * 1e20).to(device).requires_grad_()
    y = wyfold.l2norm(x, backend=backend)
    y.backward(torch.ones_like(y))
    assert not y.any() and not x.grad.any()
    assert torch.equal(F.normalize(x.detach(), dim=-1), y.detach())
    assert not wyfold.rms_norm_gated(x.detach(), x.new_ones(5, 16), x.new_ones(16), backend=backend).any()


def keys_of_length(length: float) -> torch.Tensor:
    k = F.normalize(torch.randn(1, 20, 1, 16, generator=torch.Generator().manual_seed(3)), dim=-1)
    k[:, 5:8] *= length
    return k


def run(rule: str, form: str, k: torch.Tensor, backend: str, device: torch.device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    k, v = k.to(device), torch.randn(1, 20, 1, 16, generator=generator).to(device)
    g = {}
    if rule != "delta_rule":
        g = {"g": torch.zeros(1, 20, 1, *((16,) if rule == "kda" else ()), device=device)}
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "backend": backend}
    return getattr(wyfold, f"{form}_{rule}")(k, k, v, **g, **options)


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("rule", ["delta_rule", "gated_delta_rule", "kda"])
def test_keys_within_the_range_are_as_good_as_unit_ones(rule: str, form: str, backend: str, device: torch.device):
    unit = run(rule, form, keys_of_length(100.0), backend, device)
    for got, expected in zip(run(rule, form, keys_of_length(LARGEST), backend, device), unit, strict=True):
        assert (got - expected).norm() <= PROMISED * expected.norm()


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("rule", ["delta_rule", "gated_delta_rule", "kda"])
def test_keys_beyond_the_range_write_nothing_on_eager(rule: str, form: str):
    place = "eager", torch.device("cpu")
    zeros = run(rule, form, keys_of_length(0.0), *place)
    for got, expected in zip(run(rule, form, keys_of_length(1e20), *place), zeros, strict=True):
        assert (got - expected).norm() <= PROMISED * expected.norm()
