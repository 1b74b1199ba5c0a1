"""The token loop of TTT-Linear: the inner step is a gradient step, and mini-batches are part of the model."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad, gradcheck

from wyfold.reference import ttt_linear
from wyfold.reference.error import judge, require
from wyfold.reference.inputs import draw, incoming
from wyfold.reference.shapes import PACKINGS, Shape
from wyfold.reference.targets import target

SHAPE = Shape(B=2, T=11, H=1, HV=2, K=6, V=6)
PER_CALL = ("w", "b", "initial_state", "initial_state_bias")


def wide(shape: Shape = SHAPE, **names) -> dict:
    return draw("random", "ttt_linear", shape, dtype=torch.float64, state="normal", **names)


def same(name: str, got: Tensor, truth: Tensor) -> None:
    require(judge(got, truth, name=name, target=target(name, torch.float64)))


def with_rows(arguments: dict, rows: slice) -> dict:
    return {n: x if n in PER_CALL or not isinstance(x, Tensor) else x[:, rows] for n, x in arguments.items()}


@pytest.mark.parametrize("published", [False, True], ids=["plain", "published"])
def test_the_inner_step_descends_the_reconstruction_loss(published):
    """One head, one mini-batch at a time, with autograd's gradient and PyTorch's norm.

    A token's factor weights its loss, and the published residual is the query.
    """
    m, eps = 4, 1e-6
    arguments = wide(eta_col="signed") if published else wide()
    residual = {"residual": "q"} if published else {}
    out, final, final_bias = ttt_linear(**arguments, **residual, chunk_size=m, eps=eps, output_final_state=True)
    q, k, v, w, b, eta = (arguments[n] for n in ("q", "k", "v", "w", "b", "eta"))
    weight = arguments.get("eta_col", torch.ones_like(eta))
    for n in range(SHAPE.B):
        for j in range(SHAPE.HV):

            def model(x: Tensor, S: Tensor, c: Tensor, j: int = j) -> Tensor:
                return F.layer_norm(x @ S + c, (SHAPE.V,), w[j], b[j], eps)

            S, c = arguments["initial_state"][n, j], arguments["initial_state_bias"][n, j, 0]
            for start in range(0, SHAPE.T, m):
                S0, c0 = S.detach().requires_grad_(), c.detach().requires_grad_()
                for t in range(start, min(start + m, SHAPE.T)):
                    seen = slice(start, t + 1)
                    wanted = v[n, seen, j] - k[n, seen, 0]
                    loss = 0.5 * (weight[n, seen, j] * (model(k[n, seen, 0], S0, c0) - wanted).square()).sum()
                    dS, dc = grad(loss, (S0, c0))
                    S, c = S0.detach() - eta[n, t, j] * dS, c0.detach() - eta[n, t, j] * dc
                    o = SHAPE.K**-0.5 * q[n, t, 0] @ S + c
                    base = q[n, t, 0] if published else o
                    same("o", out[n, t, j], base + F.layer_norm(o, (SHAPE.V,), w[j], b[j], eps))
            same("state", final[n, j], S)
            same("state_bias", final_bias[n, j, 0], c)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_gradients_are_the_slopes(packed):
    form = {"eta_col": "signed"} if packed else {}
    arguments = wide(Shape(B=1, T=6, H=1, HV=2, K=3, V=3), sequences=3 if packed else 1, **form)
    tensors = {n: x.requires_grad_() for n, x in arguments.items()}
    bounds = torch.tensor([0, 3, 3, 5]) if packed else None

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        # A large eps, since finite differences cannot follow a norm whose variance comes close to zero.
        given = dict(zip(tensors, values))
        options = {"chunk_size": 2, "eps": 0.1, "output_final_state": True, "cu_seqlens": bounds}
        return ttt_linear(**given, residual="q" if packed else "o", **options)

    assert gradcheck(call, tuple(tensors.values()))


def test_unknown_residuals_are_refused():
    with pytest.raises(ValueError, match='residual must be "o" or "q", got None'):
        ttt_linear(**wide(), residual=None)


def test_a_step_of_zero_keeps_the_state():
    arguments = wide(eta="zero")
    _, S, c = ttt_linear(**arguments, output_final_state=True)
    assert torch.equal(S, arguments["initial_state"]) and torch.equal(c, arguments["initial_state_bias"])


def test_a_number_is_a_step_for_every_token():
    arguments = wide()
    everywhere = torch.full((SHAPE.B, SHAPE.T, SHAPE.HV), 0.25, dtype=torch.float64)
    o, _, _ = ttt_linear(**arguments | {"eta": 0.25})
    assert torch.equal(o, ttt_linear(**arguments | {"eta": everywhere})[0])
    assert torch.equal(o, ttt_linear(**arguments | {"eta": everywhere[..., None]})[0])


def test_resuming_at_a_mini_batch_changes_no_bit_and_elsewhere_starts_a_new_one():
    arguments = wide()

    def cut(at: int) -> tuple[Tensor, Tensor, Tensor]:
        head, S, c = ttt_linear(**with_rows(arguments, slice(0, at)), chunk_size=4, output_final_state=True)
        resumed = with_rows(arguments, slice(at, None)) | {"initial_state": S, "initial_state_bias": c}
        tail, S, c = ttt_linear(**resumed, chunk_size=4, output_final_state=True)
        return torch.cat([head, tail], dim=1), S, c

    whole = ttt_linear(**arguments, chunk_size=4, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut(8)))
    assert not torch.equal(whole[1], cut(6)[1])


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_sequences_are_separate_and_other_rows_unread(packing):
    bounds, tokens = PACKINGS[packing].cu_seqlens, PACKINGS[packing].tokens
    shape = Shape(B=1, T=tokens, H=1, HV=2, K=4, V=4)
    arguments = draw("random", "ttt_linear", shape, state="normal", sequences=len(bounds) - 1)
    for n in ("q", "k", "v", "eta"):
        arguments[n][:, bounds[-1] :] = float("nan")
    tensors = {n: x.requires_grad_() for n, x in arguments.items()}
    o, S, c = ttt_linear(**arguments, output_final_state=True, cu_seqlens=torch.tensor(bounds))
    assert not o[:, bounds[-1] :].any()
    for n, (start, end) in enumerate(pairwise(bounds)):
        own = {name: arguments[name][n : n + 1] for name in PER_CALL[2:]}
        o_n, S_n, c_n = ttt_linear(**with_rows(arguments, slice(start, end)) | own, output_final_state=True)
        assert torch.equal(o[:, start:end], o_n)
        assert torch.equal(S[n : n + 1], S_n) and torch.equal(c[n : n + 1], c_n)
    if bounds[-1]:
        for n, d in zip(tensors, grad(o.sum() + S.sum() + c.sum(), tensors.values())):
            assert d.isfinite().all(), n
            if n not in PER_CALL:
                assert not d[:, bounds[-1] :].any(), n


def test_grouped_value_heads_are_copies_run_alone():
    grouped = wide(seed=3)
    tensors = {n: x.requires_grad_() for n, x in grouped.items()}
    o, _, _ = ttt_linear(**grouped)
    alone = {n: x.detach().clone() for n, x in grouped.items()}
    for n in ("q", "k"):
        alone[n] = alone[n].repeat_interleave(2, dim=2)
    copies = {n: x.requires_grad_() for n, x in alone.items()}
    o_alone, _, _ = ttt_linear(**alone)
    assert torch.equal(o, o_alone)
    got = grad(o, [tensors["q"], tensors["k"]], incoming(o))
    separate = grad(o_alone, [copies["q"], copies["k"]], incoming(o))
    for name, a, b in zip(("dq", "dk"), got, separate):
        same(name, a, b.sum(2, keepdim=True))


def test_state_layout_and_storage():
    arguments = wide()
    _, S, c = ttt_linear(**arguments, output_final_state=True)
    turned = arguments | {"initial_state": arguments["initial_state"].mT, "state_v_first": True}
    _, v_first, same_bias = ttt_linear(**turned, output_final_state=True)
    assert torch.equal(v_first, S.mT) and torch.equal(same_bias, c)
    _, half, half_bias = ttt_linear(**arguments, output_final_state=True, state_dtype=torch.float16)
    assert torch.equal(half, S.half()) and torch.equal(half_bias, c.half())
