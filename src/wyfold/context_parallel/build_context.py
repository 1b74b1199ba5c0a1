"""`build_cp_context`: the checks of its arguments, and the named layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wyfold.context_parallel import collectives
from wyfold.context_parallel.agreement import CHECKS
from wyfold.context_parallel.context import BUILD, ContextParallel
from wyfold.context_parallel.partition import LAYOUTS, Range, owned_ranges
from wyfold.runtime import check as argument
from wyfold.runtime.layout import SequenceLayout, boundaries


def build_cp_context(
    cu_seqlens: Tensor | SequenceLayout | None,
    mesh_or_group: Any,
    *,
    total_tokens: int | None = None,
    layout: str = "contiguous",
    fragments: Sequence[Sequence[Range]] | None = None,
    conv1d_kernel_size: int | None = None,
    max_seqs: int | None = None,
    check: str = "first",
) -> ContextParallel:
    """Partition one buffer of tokens over ranks, for `cp_context=` of operators and layers.

    Every rank of the group calls it with the same arguments; it runs no collective. The library sets no group, timeout
    or environment variable: a rank that never calls an operator is an error after the group's own timeout.

    Args:
        cu_seqlens: [N+1] int32 or int64 boundaries of the packed sequences of the whole buffer; waits for its device
            once. None with `total_tokens`: a dense batch of any B, whose rows are cut alike along T.
        mesh_or_group: A `ProcessGroup`, or a `DeviceMesh` of one axis (`mesh["cp"]`).
        total_tokens: Length of the whole buffer. None: the last boundary. Tokens past it belong to no sequence.
        layout: Which tokens a rank owns. "contiguous": the r-th of `world` parts, whose lengths differ by at most one
            token. "zigzag": parts r and 2 world - 1 - r of 2 world parts. "fragments": those of `fragments`.
        fragments: For each rank, a list of (start, stop); together they cover every token once. A rank holds its tokens
            in ascending order.
        conv1d_kernel_size: W of the short convolutions that will use this context; another W is an error. None: any.
        max_seqs: Capacity of the local layout, for `update_`. None: what these boundaries need.
        check: When ranks compare their calls: once for each operator and kind of arguments ("first"), in each call
            ("always") or never ("never"). The comparison is an extra collective that waits for the device. A difference
            is a ValueError on all ranks, and so is an error of one rank's arguments; after the first comparison only
            "always" detects them.

    Returns:
        ContextParallel.

    Raises:
        TypeError: an argument of the wrong Python type.
        ValueError: arguments that do not fit together; raised on every rank.

    Examples:
        >>> import torch, wyfold.cp
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> context = wyfold.cp.build_cp_context(torch.tensor([0, 3, 8]), torch.distributed.group.WORLD)
        >>> context.starts, context.ends, context.position_ids().tolist()
        ((0, 1), (0, 1), [[0, 1, 2, 0, 1, 2, 3, 4]])
        >>> torch.distributed.destroy_process_group()
    """
    group = collectives.process_group(BUILD, mesh_or_group)
    _, world = collectives.rank_and_size(group)
    bounds: Tensor | None = None
    if cu_seqlens is None:
        if total_tokens is None:
            raise ValueError(f"{BUILD}: total_tokens must be given without cu_seqlens, got None")
    else:
        if isinstance(cu_seqlens, SequenceLayout):
            total_tokens = cu_seqlens.tokens if total_tokens is None else total_tokens
            cu_seqlens = cu_seqlens.cu_seqlens
        bounds = boundaries(BUILD, cu_seqlens)
    if total_tokens is None and bounds is not None:
        total_tokens = int(bounds[-1])
    total = _integer("total_tokens", total_tokens, least=0)
    _choice("layout", layout, LAYOUTS)
    _choice("check", check, CHECKS)
    if conv1d_kernel_size is not None:
        _choice("conv1d_kernel_size", conv1d_kernel_size, range(2, 9))
    if max_seqs is not None:
        _integer("max_seqs", max_seqs, least=0)
    if (fragments is not None) is not (layout == "fragments"):
        raise ValueError(f'{BUILD}: fragments must come with layout="fragments" and only there, got layout={layout!r}')
    ranges = owned_ranges(layout, total, world) if fragments is None else _fragments(fragments, total, world)
    return ContextParallel(
        group, bounds, total, ranges, conv1d_kernel_size=conv1d_kernel_size, max_seqs=max_seqs, check_when=check
    )


def repeated(context: ContextParallel, n: int) -> ContextParallel:
    """The context of a buffer with n rows for each token, which ranks own with their token; kept until `update_`.

    Raises:
        RuntimeError: It is not made yet, and a compiler, which cannot trace that, asks for it.
    """
    if n == 1:
        return context

    def make() -> ContextParallel:
        ranges = [[(n * start, n * stop) for start, stop in owns] for owns in context.partition.ranges]
        return ContextParallel(
            context.group,
            None if context.dense else n * context.whole.cu_seqlens,
            n * context.total_tokens,
            ranges,
            conv1d_kernel_size=None,
            max_seqs=None,
            check_when=context.agreement.when,
        )

    if ("repeated", n) not in context._cache:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"cp_context must have been in a call with {n} updates of a token before one is compiled, got a new one"
            )
        context._cache["repeated", n] = make()
    found: ContextParallel = context._cache["repeated", n]
    return found


def _integer(name: str, value: object, *, least: int) -> int:
    return argument.integer(BUILD, name, value, least=least)


def _choice(name: str, value: object, options: Sequence[object]) -> None:
    argument.choice(BUILD, name, value, options)


def _fragments(fragments: Sequence[Sequence[Range]], total: int, world: int) -> list[list[Range]]:
    """Check that the fragments cover every token once; return them as ranges of every rank."""
    if not isinstance(fragments, list | tuple):
        raise TypeError(f"{BUILD}: fragments must be a list of lists of (start, stop), got {type(fragments).__name__}")
    if len(fragments) != world:
        raise ValueError(f"{BUILD}: fragments must be one list for each of {world} ranks, got {len(fragments)}")
    found = []
    for owns in fragments:
        for pair in owns:
            if len(pair) != 2 or _integer("fragments", pair[0], least=0) > _integer("fragments", pair[1], least=0):
                raise ValueError(f"{BUILD}: fragments must be (start, stop) with start <= stop, got {pair}")
        found.append([(start, stop) for start, stop in owns])
    place = 0
    for start, stop in sorted(pair for owns in found for pair in owns if pair[0] < pair[1]):
        if start != place:
            raise ValueError(f"{BUILD}: fragments must hold every token once, got {(start, stop)} after token {place}")
        place = stop
    if place != total:
        raise ValueError(f"{BUILD}: fragments must end at total_tokens = {total}, got {place}")
    return found
