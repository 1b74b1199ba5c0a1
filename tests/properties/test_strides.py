"""Strides change no bit: each kind of stride on each argument and each incoming gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

RULES = ("delta_rule", "gated_delta_rule", "kda")
FORMS = ("chunk", "fused_recurrent")


def reordered(order: Callable[[int], list[int]]) -> Callable[[Tensor], Tensor]:
    """A function that permutes the axes in memory and leaves the tensor's values and shape unchanged."""

    def place(x: Tensor) -> Tensor:
        axes = order(x.ndim)
        back = sorted(range(x.ndim), key=axes.__getitem__)
        return x.permute(axes).contiguous().permute(back)

    return place


def inside(before: int, after: int, axis: int) -> Callable[[Tensor], Tensor]:
    """A function that places a tensor inside a longer one along an axis, with NaN around it."""

    def place(x: Tensor) -> Tensor:
        at = axis % x.ndim
        size = list(x.shape)
        size[at] += before + after
        return torch.full(size, torch.nan, dtype=x.dtype).narrow(at, before, x.shape[at]).copy_(x)

    return place


def every_other(axis: int) -> Callable[[Tensor], Tensor]:
    def place(x: Tensor) -> Tensor:
        at = axis % x.ndim
        return (
            torch.stack([x, torch.full_like(x, torch.nan)], at + 1)
            .flatten(at, at + 1)
            .unflatten(at, (-1, 2))
            .select(at + 1, 0)
        )

    return place


def off_by_one(x: Tensor) -> Tensor:
    """A copy that is aligned to one element only."""
    return torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(x.shape)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads before tokens": reordered(lambda n: [0, 2, 1, *range(3, n)]),
    "tokens before batch": reordered(lambda n: [1, 0, *range(2, n)]),
    "last axis first": reordered(lambda n: [n - 1, *range(n - 1)]),
    "all axes reversed": reordered(lambda n: list(reversed(range(n)))),
    "time stride 1": reordered(lambda n: [0, *range(2, n), 1]),
    "inside a longer batch": inside(1, 2, 0),
    "inside more tokens": inside(3, 5, 1),
    "inside a wider projection": inside(4, 7, -1),
    "inside more heads": inside(1, 1, 2),
    "every other token": every_other(1),
    "every other column": every_other(-1),
    "off by one element": off_by_one,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", [pytest.param("delta_rule", marks=pytest.mark.release), "gated_delta_rule", "kda"])
def test_stride_kind(rule: str, form: str, kind: str, results):
    op = getattr(wyfold, f"{form}_{rule}")
    dtype = (torch.float32, torch.bfloat16)[list(KINDS).index(kind) % 2]
    a = inputs.draw("random", rule, Shape(2, 21, 2, 4, 16, 8), gate="weak", state="normal", dtype=dtype)
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    plain = results(op, a, None, fed, output_final_state=True)
    laid = {name: KINDS[kind](x) for name, x in a.items()}
    for name, x in laid.items():
        assert torch.equal(x, a[name]) and (x.stride() != a[name].stride() or x.storage_offset() or "batch" in kind)
    for changed in [[name] for name in laid] + [list(laid)]:
        got = results(op, a | {name: laid[name] for name in changed}, None, fed, output_final_state=True)
        assert all(torch.equal(got[name], plain[name]) for name in plain), changed
    for changed in (["o"], ["state"], ["o", "state"]):
        arrows = fed | {name: KINDS[kind](fed[name]) for name in changed}
        got = results(op, a, None, arrows, output_final_state=True)
        assert all(torch.equal(got[name], plain[name]) for name in plain), changed


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_expanded(rule: str, form: str, results):
    """Stride 0: one row for the whole batch, one gate for all heads, a gradient of one number."""
    op = getattr(wyfold, f"{form}_{rule}")
    one = inputs.draw("random", rule, Shape(1, 21, 2, 4, 16, 8), state="normal")
    wide = {name: x.expand(3, *x.shape[1:]) for name, x in one.items()}
    wide["beta"] = wide["beta"][..., :1].expand(3, 21, 4)
    flat = {name: x.contiguous() for name, x in wide.items()}
    fed = {"o": torch.ones(()).expand(3, 21, 4, 8), "state": torch.tensor(0.5).expand(3, 4, 16, 8)}
    got = results(op, wide, None, fed, output_final_state=True)
    plain = results(op, flat, None, {name: x.contiguous() for name, x in fed.items()}, output_final_state=True)
    assert all(torch.equal(got[name], plain[name]) for name in plain)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_views_of_one_projection(rule: str, form: str, results):
    """q, k and v as the layers cut them from one matrix product."""
    op = getattr(wyfold, f"{form}_{rule}")
    a = inputs.draw("random", rule, Shape(2, 21, 2, 2, 8, 16))
    packed = torch.cat([a[name].flatten(2) for name in ("q", "k", "v")], -1).requires_grad_()
    q, k, v = packed.split([16, 16, 32], -1)
    o, _ = op(**a | {"q": q.unflatten(-1, (2, 8)), "k": k.unflatten(-1, (2, 8)), "v": v.unflatten(-1, (2, 16))})
    arrow = inputs.incoming(o)
    (dx,) = torch.autograd.grad(o, packed, arrow)
    plain = results(op, a, None, {"o": arrow})
    assert torch.equal(o, plain["o"])
    assert torch.equal(dx, torch.cat([plain[f"d{name}"].flatten(2) for name in ("q", "k", "v")], -1))


@pytest.mark.parametrize("form", FORMS)
def test_the_same_tensor_as_several_arguments(form: str, results):
    op = getattr(wyfold, f"{form}_delta_rule")
    x = inputs.draw("random", "delta_rule", Shape(2, 21, 2, 2, 8, 8))["k"].requires_grad_()
    o, _ = op(x, x, x)
    arrow = inputs.incoming(o)
    (dx,) = torch.autograd.grad(o, x, arrow)
    apart = results(op, {name: x.detach().clone() for name in ("q", "k", "v")}, None, {"o": arrow})
    # Autograd adds the three gradients from the last argument to the first, or the reverse. Both sums are exactly
    # rounded.
    sums = [(apart["dq"] + apart["dk"]) + apart["dv"], (apart["dv"] + apart["dk"]) + apart["dq"]]
    assert torch.equal(o, apart["o"]) and any(torch.equal(dx, total) for total in sums)
