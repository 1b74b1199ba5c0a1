"""fla's context parallelism: its context's fields are fla's, and ranks compute what one process does."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.context_parallel.ranks import Case, failures_on_ranks
from torch import Tensor

from wyfold import UnsupportedError
from wyfold.integrations import fla
from wyfold.integrations.fla import ranks

CONTEXTS = json.loads((Path(__file__).parent / "fla_contexts.json").read_text(encoding="utf-8"))
"""What fla 0.6.0's `get_cp_cu_seqlens` gives on every rank."""

T, H, K, D, W = 48, 2, 16, 6, 4
BOUNDS = [0, 5, 24, 25, T]


def tensors() -> dict[str, Tensor]:
    x = {name: torch.randn(1, T, H, K) for name in ("q", "k", "v")}
    gates = {"g": -torch.rand(1, T, H), "gk": -torch.rand(1, T, H, K), "beta": torch.rand(1, T, H)}
    return {**x, **gates, "x": torch.randn(1, T, D), "weight": torch.randn(D, W)}


def gdn(t: dict[str, Tensor], **options: Any) -> Tensor:
    return fla.chunk_gated_delta_rule(t["q"], t["k"], t["v"], t["g"], t["beta"], **options)[0]


def kda(t: dict[str, Tensor], **options: Any) -> Tensor:
    return fla.chunk_kda(t["q"], t["k"], t["v"], t["gk"], t["beta"], **options)[0]


def product(t: dict[str, Tensor], **options: Any) -> Tensor:
    """Two updates of a token."""
    k, v = (torch.stack([t[a], t[b]], 2).flatten(1, 2) for a, b in (("k", "v"), ("v", "q")))
    beta = t["beta"].repeat_interleave(2, 1)
    options["use_qk_l2norm_in_kernel"] = True
    return fla.chunk_gated_delta_product(t["q"], k, v, t["g"], beta, 2, **options)[0]


def conv(t: dict[str, Tensor], **options: Any) -> Tensor:
    return fla.causal_conv1d(t["x"], t["weight"], activation="silu", **options)[0]


def with_gradients(run: Callable[[dict[str, Tensor]], Tensor], given: dict[str, Tensor]) -> tuple[Tensor, Any]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    y = run(leaves)
    y.square().sum().backward()
    return y.detach(), {name: x.grad for name, x in leaves.items() if x.grad is not None}


def prepared(operator: Callable[..., Tensor]) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    given = tensors()
    y, gradients = with_gradients(lambda t: operator(t, cu_seqlens=torch.tensor(BOUNDS)), given)
    return given, y, gradients


def on_rank(operator: Callable[..., Tensor], layout: str, ready: Any, group: dist.ProcessGroup) -> None:
    given, y, gradients = ready
    context = ranks.build_cp_context(torch.tensor(BOUNDS), group, W, layout=layout)
    assert context.context is not None
    shard = context.context.shard
    own = {name: x if name == "weight" else shard(x) for name, x in given.items()}
    # Callers pass the local boundaries too, of which the context takes precedence.
    found, dfound = with_gradients(lambda t: operator(t, cu_seqlens=context.cu_seqlens, cp_context=context), own)
    close(found, shard(y))
    for name, expected in gradients.items():
        if name == "weight":
            dist.all_reduce(dfound[name], group=group)
        close(dfound[name], expected if name == "weight" else shard(expected))


def close(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).abs().max()) <= 2e-5 * max(1.0, float(expected.abs().max()))


def fields(_: None, group: dist.ProcessGroup) -> None:
    """The fields of every recorded context for this number of ranks."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for recorded in CONTEXTS:
        if len(recorded["ranks"]) != world:
            continue
        cu_seqlens = torch.tensor(recorded["cu_seqlens"])
        context = ranks.build_cp_context(cu_seqlens, group, 4, cu_seqlens_cpu=cu_seqlens, layout=recorded["layout"])
        expected = recorded["ranks"][rank]
        for name in (field.name for field in dataclasses.fields(context)):
            value = getattr(context, name)
            if name in ("group", "context", "conv1d_kernel_size", "layout", "cu_seqlens_cpu"):
                continue
            found = value.tolist() if isinstance(value, Tensor) else list(value) if isinstance(value, tuple) else value
            assert found == expected.get(name), (recorded, name, found)
        assert context.num_seqs == len(expected["cu_seqlens"]) - 1 and context.is_cp_enabled
        copy = context.copy_for_backward()
        assert copy.context is context.context and copy.cu_seqlens is not context.cu_seqlens
        assert context.cu_seqlens is not None and context.cu_seqlens.dtype == torch.int32


def exchanges(_: None, group: dist.ProcessGroup) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    x = torch.full((3,), rank + 1.0)
    before, after = torch.full((3,), float(rank)), torch.full((3,), (rank + 2.0) % (world + 1))
    assert torch.equal(ranks.conv_cp_send_recv_fwd(x, group), before)
    assert torch.equal(ranks.conv_cp_send_recv_bwd(x, group), after)
    assert torch.equal(ranks.send_recv_fwd(x, group, recv_from_prev=False), after)
    assert torch.equal(ranks.send_recv_bwd(x, group, recv_from_next=False), before)
    gathered, _ = ranks.all_gather_into_tensor(x, group=group)
    assert torch.equal(gathered[:, 0], torch.arange(world) + 1.0)
    total, _ = ranks.all_reduce_sum(x, group)
    assert total is x and float(x[0]) == world * (world + 1) / 2


def refusals(_: None, group: dist.ProcessGroup) -> None:
    context = ranks.build_cp_context(torch.tensor(BOUNDS), group)
    assert context.context is not None
    own = {name: x if name == "weight" else context.context.shard(x) for name, x in tensors().items()}
    with pytest.raises(ValueError, match="output_final_state must not come with fla's cp_context"):
        gdn(own, cp_context=context, output_final_state=True)
    with pytest.raises(ValueError, match="initial_state must not come with fla's cp_context"):
        kda(own, cp_context=context, initial_state=torch.zeros(4, H, K, K))
    by_hand = ranks.FLACPContext(group=group, cu_seqlens=context.cu_seqlens)
    with pytest.raises(TypeError, match=r"cp_context must come from .*FLACPContext made otherwise"):
        conv(own, cp_context=by_hand)
    counted = dataclasses.replace(context, pre_num_ranks_dev=torch.zeros(1))
    with pytest.raises(UnsupportedError, match="pre_num_ranks_dev"):
        gdn(own, cp_context=counted)
    parts = 2 * dist.get_world_size(group)
    for bad in (torch.tensor([0, parts + 1]), torch.tensor([0, 0])):
        with pytest.raises(ValueError, match=f"positive multiple of {parts}"):
            ranks.build_cp_context(bad, group, layout="zigzag")
    with pytest.raises(ValueError, match="use_tf32x3_affine_chain must be True"):
        ranks.build_cp_context(torch.tensor(BOUNDS), group, use_tf32x3_affine_chain=False)
    with pytest.raises(ValueError, match="layout must be"):
        ranks.build_cp_context(torch.tensor(BOUNDS), group, layout="ring")


CASES = {
    **{
        f"{operator.__name__}, {layout}": Case(partial(prepared, operator), partial(on_rank, operator, layout))
        for operator in (gdn, kda, product, conv)
        for layout in ("contiguous", "zigzag")
    },
    "fields": Case(lambda: None, fields),
    "exchanges": Case(lambda: None, exchanges, least=2),
    "refusals": Case(lambda: None, refusals, most=2),
}


def test_ranks_compute_what_one_process_does(tmp_path: Path):
    assert not failures_on_ranks([1, 2, 3], tmp_path, "tests.integrations.test_fla_ranks", "CASES")
