"""Collectives of a process group: all-gather and all-to-all.

torch.distributed is imported only when a context is made, because PyTorch can be built without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from wyfold.runtime import recording
from wyfold.runtime.recorder import OperationMode
from wyfold.runtime.torch_ops import register


def process_group(op: str, mesh_or_group: object) -> Any:
    """Return the process group of a one-axis mesh, or the group itself.

    Raises:
        TypeError: the argument is neither.
        ValueError: the mesh has more axes, this rank is not in the group, or torch.distributed is not initialized.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"{op}: mesh_or_group must belong to an initialized torch.distributed, got none initialized")
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.ndim != 1:
            axes = mesh_or_group.ndim
            raise ValueError(f'{op}: mesh_or_group must be a mesh of one axis, mesh["cp"], got {axes} axes')
        return mesh_or_group.get_group()
    if mesh_or_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{op}: mesh_or_group must be a group that this rank is a member of, got one it is not in")
    if not isinstance(mesh_or_group, dist.ProcessGroup):
        got = type(mesh_or_group).__name__
        raise TypeError(f"{op}: mesh_or_group must be a ProcessGroup or a DeviceMesh, got {got}")
    return mesh_or_group


def rank_and_size(group: Any) -> tuple[int, int]:
    """Return this process's rank in the group, and the group's size."""
    import torch.distributed as dist

    return dist.get_rank(group), dist.get_world_size(group)


def after(x: Tensor, *others: Tensor | None) -> Tensor:
    """Return x with a data dependency on the others, which a compiler must respect.

    A rank's send buffer may depend on no input, and its results on nothing gathered. Without the dependency a compiler
    would move or drop the collective on that rank, for example from the backward into the forward, and other ranks
    would wait.
    """
    if not torch.compiler.is_compiling():
        return x
    found: Tensor = _after_op(x, [other for other in others if other is not None])
    return found


_after_op = register(
    "after(Tensor x, Tensor[] others) -> Tensor", lambda x, _: x.clone(), lambda x, _: torch.empty_like(x)
)


class _NotReplayed(OperationMode):
    """Mode whose presence keeps calls from being replayed."""

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


_counters: list[list[int]] = []


@contextmanager
def count_sent_bytes() -> Iterator[list[int]]:
    """Record the bytes that this rank sends in each collective of the block, whose calls are not replayed."""
    sent: list[int] = []
    _counters.append(sent)
    try:
        with _NotReplayed():
            yield sent
    finally:
        _counters.pop()


def all_gather(x: Tensor, group: Any) -> Tensor:
    """All-gather x: [world, *x.shape] in the order of ranks; the shape must be the same on all ranks."""
    import torch.distributed as dist

    world = dist.get_world_size(group)
    if not torch.compiler.is_compiling():
        with AllGather(x.contiguous(), world, group.group_name) as gathering:
            return gathering.wait()
    found = x.new_empty(world, *x.shape)
    if _sends(x):
        # PyTorch 2.13 renamed it, and warns about the old name.
        collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        collective(found.flatten(), x.contiguous().flatten(), group=group)
    return found


class AllGather:
    """An all-gather that is launched when this is made, and waited for at the latest where its block ends.

    In between the device can run work that needs nothing from other ranks. PyTorch keeps the memory of a collective
    until it is waited for, also if nothing reads the result.

    Args:
        x: Contiguous tensor of the same shape on all ranks; kept alive until the wait.
        world: Number of ranks.
        group: Name of the process group.
    """

    def __init__(self, x: Tensor, world: int, group: str):
        self._sent, self._waited = x, not _sends(x)
        if self._waited:
            self._gathered = x.new_empty(world, *x.shape)
        else:
            launch = torch.ops._c10d_functional.all_gather_into_tensor.default
            self._gathered = launch(x.view(-1), world, group).view(world, *x.shape)

    def wait(self) -> Tensor:
        """Return [world, *x.shape]; work launched on the current stream after this waits for the other ranks."""
        if not self._waited:
            recording.wait_collective(self._gathered)
            self._waited = True
        return self._gathered

    def __enter__(self) -> AllGather:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


def all_to_all(x: Tensor, group: Any) -> Tensor:
    """Send x[r] to rank r; entry r of the result is from rank r. The shape must be the same on all ranks.

    Args:
        x: [world, ...].
        group: Process group.
    """
    if torch.compiler.is_compiling():
        return all_gather(x, group)[:, rank_and_size(group)[0]]
    if not _sends(x):
        return torch.empty_like(x)
    one_row_a_rank = [1] * x.shape[0]
    launch = torch.ops._c10d_functional.all_to_all_single.default
    found: Tensor = launch(x.flatten(1).contiguous(), one_row_a_rank, one_row_a_rank, group.group_name)
    recording.wait_collective(found)
    return found.view(x.shape)


def _sends(x: Tensor) -> bool:
    """Whether x has elements to send, which is the same on every rank; record its bytes if so."""
    for sent in _counters if x.numel() else ():
        sent.append(x.numel() * x.element_size())
    return x.numel() > 0


def sum_over_ranks(x: Tensor, group: Any) -> Tensor:
    """Sum x over all ranks, in the same order on each, so that all get the same bits."""
    return torch.stack(list(all_gather(x, group))).sum(0)
