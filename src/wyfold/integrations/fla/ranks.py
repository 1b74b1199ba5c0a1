"""Context parallelism under fla's names (`fla.ops.cp`): Wyfold's operators over ranks, given fla's context.

A context describes one buffer of packed sequences over the ranks of a group. `build_cp_context` also makes the
`wyfold.cp` context of the same buffer, which the operators of these names run with. As in fla, no states go in or out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wyfold import cp
from wyfold.context_parallel import collectives
from wyfold.runtime.check import UnsupportedError

_BUILD = "build_cp_context"


@dataclass
class FLACPContext:
    """This rank's part of a buffer of packed sequences; made by `build_cp_context`.

    Attributes:
        group: Process group.
        cu_seqlens, cu_seqlens_cpu: int32 boundaries of the sequences within the part, on the caller's device and on the
            CPU.
        is_first_rank, is_last_rank: Whether the part's first sequence begins, and its last one ends, on this rank.
        pre_num_ranks, post_num_ranks: Ranks before and after this one that hold tokens of these sequences.
        conv1d_kernel_size: As given.
        pre_num_conv_tokens: Tokens of the first sequence before the part.
        layout: "contiguous" or "zigzag". In zigzag the part is two runs of `part_len` tokens, the first of them with
            `front_num_seqs` sequences, and the fields of the first sequence and the last are pairs, `.._by_part`.
        pre_num_ranks_dev, post_num_ranks_dev: Counts for fla's CUDA graphs; operators refuse a context that has them.
        context: The `wyfold.cp.ContextParallel` of the same buffer; operators refuse a context without one.
    """

    group: Any = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    is_last_rank: bool | None = None
    pre_num_ranks: int | None = None
    is_first_rank: bool | None = None
    post_num_ranks: int | None = None
    conv1d_kernel_size: int | None = None
    pre_num_conv_tokens: int | None = None
    use_tf32x3_affine_chain: InitVar[bool] = True
    pre_num_ranks_dev: Tensor | None = None
    post_num_ranks_dev: Tensor | None = None
    layout: str = "contiguous"
    part_len: int | None = None
    front_num_seqs: int | None = None
    pre_num_ranks_by_part: tuple[int, int] | None = None
    post_num_ranks_by_part: tuple[int, int] | None = None
    is_first_by_part: tuple[bool, bool] | None = None
    is_last_by_part: tuple[bool, bool] | None = None
    pre_num_conv_tokens_by_part: tuple[int, int] | None = None
    context: cp.ContextParallel | None = field(default=None, repr=False, compare=False)

    def __post_init__(self, use_tf32x3_affine_chain: bool) -> None:
        if not use_tf32x3_affine_chain:
            raise ValueError("FLACPContext: use_tf32x3_affine_chain must be True, got False")

    def copy_for_backward(self) -> FLACPContext:
        """A copy that shares no boundaries."""
        on_device, on_cpu = (None if x is None else x.clone() for x in (self.cu_seqlens, self.cu_seqlens_cpu))
        return replace(self, cu_seqlens=on_device, cu_seqlens_cpu=on_cpu)

    @property
    def num_seqs(self) -> int:
        """Sequences that have tokens in this part."""
        return 0 if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def is_cp_enabled(self) -> bool:
        return self.group is not None


def build_cp_context(
    cu_seqlens: Tensor,
    group: Any,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
) -> FLACPContext:
    """Divide a buffer of packed sequences among the ranks of a group.

    Ranks do not compare their calls, as in fla; `wyfold.cp.build_cp_context` makes a context with which they do.

    Args:
        cu_seqlens: [N+1] boundaries of the whole buffer, of which each rank takes an equal part.
        group: Process group, or a mesh of one axis.
        conv1d_kernel_size: Kernel size of the short convolutions.
        cu_seqlens_cpu: The same boundaries on the CPU. None: they are copied, which waits for the device.
        use_tf32x3_affine_chain: Must be True, as in fla.
        layout: "contiguous": rank r has part r. "zigzag": rank r has parts r and 2 * world - 1 - r of twice as many.

    Raises:
        TypeError, ValueError: As `wyfold.cp.build_cp_context`; or the tokens cannot be divided equally.

    Examples:
        >>> import torch, wyfold.integrations.fla.ranks as ranks
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> part = ranks.build_cp_context(torch.tensor([0, 3, 8]), torch.distributed.group.WORLD, 4)
        >>> part.cu_seqlens.tolist(), part.is_first_rank, part.pre_num_conv_tokens
        ([0, 3, 8], True, 0)
        >>> torch.distributed.destroy_process_group()
    """
    if not use_tf32x3_affine_chain:
        raise ValueError(f"{_BUILD}: use_tf32x3_affine_chain must be True, got False")
    on_cpu = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).cpu()
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f'{_BUILD}: layout must be "contiguous" or "zigzag", got {layout!r}')
    context = cp.build_cp_context(on_cpu, group, layout=layout, conv1d_kernel_size=conv1d_kernel_size, check="never")
    parts = context.world * (1 if layout == "contiguous" else 2)
    if context.total_tokens == 0 or context.total_tokens % parts:
        raise ValueError(
            f"{_BUILD}: cu_seqlens must end at a positive multiple of {parts}, the parts of this layout, got "
            f"{context.total_tokens}; wyfold.cp.build_cp_context takes any length"
        )
    part_len, bounds = context.total_tokens // parts, on_cpu.tolist()
    own = [context.rank] if layout == "contiguous" else [context.rank, parts - 1 - context.rank]
    runs = [_Run(bounds, part, part_len) for part in own]
    ends = [0]
    for number, run in enumerate(runs):
        ends += [number * part_len + end for end in run.ends]
    local = torch.tensor(ends, dtype=torch.int32)
    shared = FLACPContext(
        group=collectives.process_group(_BUILD, group),
        cu_seqlens=local.to(cu_seqlens.device, non_blocking=True),
        cu_seqlens_cpu=local,
        conv1d_kernel_size=conv1d_kernel_size,
        layout=layout,
        context=context,
    )
    if layout == "contiguous":
        run = runs[0]
        return replace(
            shared,
            is_first_rank=run.before == 0,
            is_last_rank=run.after == 0,
            pre_num_ranks=run.before,
            post_num_ranks=run.after,
            pre_num_conv_tokens=run.tokens_before,
        )
    front, back = runs
    return replace(
        shared,
        part_len=part_len,
        front_num_seqs=len(front.ends),
        pre_num_ranks_by_part=(front.before, back.before),
        post_num_ranks_by_part=(front.after, back.after),
        is_first_by_part=(front.before == 0, back.before == 0),
        is_last_by_part=(front.after == 0, back.after == 0),
        pre_num_conv_tokens_by_part=(front.tokens_before, back.tokens_before),
    )


class _Run:
    """One run of `length` tokens of the buffer, the `part`-th.

    Attributes:
        ends: Ends of the sequences within the run.
        before, after: Parts before and after it that hold tokens of its first, and of its last, sequence.
        tokens_before: Tokens of its first sequence before it.
    """

    def __init__(self, bounds: list[int], part: int, length: int):
        start, stop = part * length, (part + 1) * length
        first, last = bounds[bisect_right(bounds, start) - 1], bounds[bisect_left(bounds, stop)]
        inside = sorted({bound for bound in bounds if start < bound < stop} | {stop})
        self.ends = [bound - start for bound in inside]
        self.before, self.after = part - first // length, (last - 1) // length - part
        self.tokens_before = start - first


def wyfold_context(op: str, cp_context: object, initial_state: Tensor | None, output_final_state: object) -> Any:
    """The `wyfold.cp` context of fla's; None for None.

    Raises:
        TypeError: It is no context of `build_cp_context` here.
        ValueError: A state comes with it, or is asked for.
    """
    if cp_context is None:
        return None
    if not isinstance(cp_context, FLACPContext) or cp_context.context is None:
        what = "wyfold.integrations.fla.ranks.build_cp_context"
        raise TypeError(f"{op}: cp_context must come from {what}, got {type(cp_context).__name__} made otherwise")
    if cp_context.pre_num_ranks_dev is not None or cp_context.post_num_ranks_dev is not None:
        raise UnsupportedError(
            f"{op}: cp_context.pre_num_ranks_dev and post_num_ranks_dev are not offered",
            {"wyfold": "wyfold.cp contexts take other boundaries with update_"},
        )
    if initial_state is not None or output_final_state:
        given = "initial_state" if initial_state is not None else "output_final_state"
        raise ValueError(
            f"{op}: {given} must not come with fla's cp_context; wyfold.{op} takes states with wyfold.cp's"
        )
    return cp_context.context


# --- exchanges between ranks -----------------------------------------------------------------------------------------


def all_gather_into_tensor(
    inp: Tensor, out: Tensor | None = None, group: Any = None, async_op: bool = False
) -> tuple[Tensor, Any]:
    """Every rank's tensor, [world, ..], and the handle to wait for with `async_op`; into `out` if given."""
    import torch.distributed as dist

    gathered = inp.new_empty(dist.get_world_size(group), *inp.shape) if out is None else out
    # PyTorch 2.13 renamed it, and warns about the old name.
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gathered, collective(gathered.view(-1), inp.contiguous().view(-1), group=group, async_op=async_op)


def all_reduce_sum(inp: Tensor, group: Any = None, async_op: bool = False) -> tuple[Tensor, Any]:
    """The ranks' tensors summed, in place, and the handle to wait for with `async_op`."""
    import torch.distributed as dist

    return inp, dist.all_reduce(inp, dist.ReduceOp.SUM, group=group, async_op=async_op)


def send_recv_fwd(send_tensor: Tensor, group: Any, recv_from_prev: bool = True) -> Tensor:
    """The tensor of the rank before this one, or after it; zeros where there is none. Every rank calls it."""
    return _neighbour(send_tensor, group, -1 if recv_from_prev else 1)


def send_recv_bwd(send_tensor: Tensor, group: Any, recv_from_next: bool = True) -> Tensor:
    """The tensor of the rank after this one, or before it; zeros where there is none. Every rank calls it."""
    return _neighbour(send_tensor, group, 1 if recv_from_next else -1)


def conv_cp_send_recv_fwd(tails: Tensor, group: Any) -> Tensor:
    """The last inputs of the rank before this one, for a convolution; zeros on the first rank."""
    return _neighbour(tails, group, -1)


def conv_cp_send_recv_bwd(d_initial_state: Tensor, group: Any) -> Tensor:
    """The gradient that the rank after this one has for this rank's last inputs; zeros on the last rank."""
    return _neighbour(d_initial_state, group, 1)


def _neighbour(x: Tensor, group: Any, step: int) -> Tensor:
    rank, world = collectives.rank_and_size(group)
    gathered = collectives.all_gather(x, group)
    return gathered[rank + step].clone() if 0 <= rank + step < world else torch.zeros_like(x)
