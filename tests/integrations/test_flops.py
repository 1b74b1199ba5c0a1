"""PyTorch's FLOP counter counts Wyfold's operators by their definitions."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import wyfold
from wyfold.integrations import flops

B, T, H, HV, K, V, C, W = 2, 20, 2, 4, 8, 16, 16, 4
TOKENS = B * T


def counted(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.fixture(autouse=True)
def registered():
    flops.register()
    flops.register()  # a second call has no effect


def inputs(*last: int, gradient: bool) -> torch.Tensor:
    return torch.randn(B, T, *last, requires_grad=gradient)


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("rule", ["delta_rule", "gated_delta_rule", "kda"])
def test_a_delta_rule_reads_its_state_twice_and_writes_it_once(rule, form):
    operator = getattr(wyfold, f"{form}_{rule}")
    gate = {"delta_rule": {}, "gated_delta_rule": {"g": -torch.rand(B, T, HV)}, "kda": {"g": -torch.rand(B, T, HV, K)}}
    q, k, v = (inputs(heads, width, gradient=True) for heads, width in ((H, K), (H, K), (HV, V)))
    once = 3 * 2 * TOKENS * HV * K * V
    assert counted(lambda: operator(q, k, v, **gate[rule])) == once
    assert counted(lambda: operator(q, k, v, **gate[rule])[0].sum().backward()) == 3 * once


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_a_rule_with_two_columns_writes_its_state_twice(form):
    q, k, v = (inputs(heads, width, gradient=True) for heads, width in ((H, K), (H, K), (HV, V)))
    once = 2 * TOKENS * HV * K * V
    for name, further, products in (("dplr_delta_rule", (k, k), 4), ("comba", (k,), 3), ("gdn2", (), 3)):
        operator = getattr(wyfold, f"{form}_{name}")
        assert counted(lambda: operator(q, k, v, *further)) == products * once  # noqa: B023
        assert counted(lambda: operator(q, k, v, *further)[0].sum().backward()) == 3 * products * once  # noqa: B023


def test_ttt_and_the_convolution():
    q = inputs(H, K, gradient=True)
    norm = torch.ones(H, K), torch.zeros(H, K)
    assert counted(lambda: wyfold.chunk_ttt_linear(q, q, q, *norm, 0.1)[0].sum().backward()) == 18 * TOKENS * H * K * K
    x, weight = inputs(12, gradient=True), torch.randn(12, W, requires_grad=True)
    assert counted(lambda: wyfold.causal_conv1d(x, weight)[0].sum().backward()) == 6 * TOKENS * 12 * W


def test_path_attention_counts_as_softmax_attention():
    q, k, v = (inputs(heads, width, gradient=True) for heads, width in ((HV, K), (H, K), (H, V)))
    w, beta = wyfold.l2norm(k.detach()), torch.rand(B, T, H)
    once = 2 * B * HV * T * T * (K + V)
    assert counted(lambda: wyfold.parallel_path_attn(q, k, v, w, beta)[0].sum().backward()) == 3 * once


def test_triangles():
    A = torch.randn(B, T, H, C).tril(-1)
    assert counted(lambda: wyfold.solve_tril(A)) == B * T * H * C * C // 3
    k, beta = inputs(H, K, gradient=False), torch.rand(B, T, HV)
    assert counted(lambda: wyfold.chunk_scaled_dot_kkt(k, beta, chunk_size=C)) == TOKENS * HV * K * C


def test_every_operator_with_products_has_a_formula():
    """A new operator must have a formula or be listed as having no matrix products."""
    without = {"l2norm", "rms_norm_gated", "gate", "beta_sigmoid", "serve", "conv_serve", "after", "once"}
    # Maps that ranks exchange, which one process does not compute.
    without |= {"rank_maps", "received", "rank_exchange"}
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("wyfold::")}
    names = {name.removeprefix("wyfold::") for name in names}
    unknown = {name for name in names - flops.FORMULAS.keys() if not any(word in name for word in without)}
    assert not unknown and flops.FORMULAS.keys() <= names
