"""Registered operators: no autocast inside, one derivative, and gradients that a compiler asks for without need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import wyfold

TOKENS = (1, 20, 2, 8)
ONCE = {
    "delta": lambda x: wyfold.chunk_delta_rule(x, x, x)[0],
    "recurrent": lambda x: wyfold.fused_recurrent_delta_rule(x, x, x)[0],
    "ttt": lambda x: wyfold.chunk_ttt_linear(x, x, x, torch.ones(2, 8), torch.zeros(2, 8), 0.1)[0],
    "conv": lambda x: wyfold.causal_conv1d(x.flatten(2), torch.ones(16, 4))[0],
    "norm": wyfold.l2norm,
    "gate": lambda x: wyfold.fused_kda_gate(x),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_second_derivative_is_refused_and_never_left_out(name: str):
    """Also where the incoming gradient needs none, as after a sum: a gradient penalty must not lose its term."""
    x = torch.randn(TOKENS, requires_grad=True)
    (dx,) = torch.autograd.grad(ONCE[name](x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        dx.square().sum().backward()


@pytest.mark.parametrize("name", ONCE)
def test_asking_for_the_graph_changes_no_gradient(name: str):
    x = torch.randn(TOKENS, requires_grad=True)
    (plain,) = torch.autograd.grad(ONCE[name](x).sum(), x)
    (with_graph,) = torch.autograd.grad(ONCE[name](x).sum(), x, create_graph=True)
    assert torch.equal(plain, with_graph.detach())


@pytest.mark.parametrize("name", ["delta", "recurrent", "ttt", "conv"])
def test_compiled_gradients_without_a_final_state(name: str):
    """A compiler hands the backward a zero gradient even for the empty result in a missing state's place."""
    call: Callable[[torch.Tensor], torch.Tensor] = ONCE[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    x = torch.randn(TOKENS, requires_grad=True)
    do = torch.randn(call(x).shape)
    (eager,) = torch.autograd.grad(call(x), x, do)
    (graph,) = torch.autograd.grad(compiled(x), x, do)
    assert torch.equal(eager, graph)


@pytest.mark.parametrize("name", ["delta", "recurrent", "ttt", "conv"])
def test_autocast_stays_outside(name: str):
    """q, k and v are cast by the operator's own rule; the products inside keep their float32, forward and backward."""
    x, do = torch.randn(TOKENS), torch.randn(ONCE[name](torch.zeros(TOKENS)).shape)
    cast = (x if name == "conv" else x.bfloat16()).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        under = ONCE[name](cast)
        (gradient,) = torch.autograd.grad(under, cast, do.to(under.dtype))
    wanted = ONCE[name](cast)
    assert torch.equal(under, wanted)
    assert torch.equal(gradient, torch.autograd.grad(wanted, cast, do.to(wanted.dtype))[0])
