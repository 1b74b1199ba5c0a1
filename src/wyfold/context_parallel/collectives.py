"""Collectives of a process group: all-gather, all-to-all, and the check that ranks agree on their next call.

torch.distributed is imported only when a context is made, because PyTorch can be built without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from wyfold.runtime import recording
from wyfold.runtime.torch_ops import register

TEXT_BYTES = 2048  # of a description or an error; a fixed size, because every rank must gather the same shape
_REFUSED = "refused"


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


_counters: list[list[int]] = []


@contextmanager
def count_sent_bytes() -> Iterator[list[int]]:
    """Record the bytes that this rank sends in each collective of the block."""
    sent: list[int] = []
    _counters.append(sent)
    try:
        yield sent
    finally:
        _counters.pop()


def all_gather(x: Tensor, group: Any) -> Tensor:
    """All-gather x: [world, *x.shape] in the order of ranks; the shape must be the same on all ranks."""
    if not torch.compiler.is_compiling():
        return wait_gathered(all_gather_async(x.contiguous(), group))
    import torch.distributed as dist

    world = dist.get_world_size(group)
    found = x.new_empty(world, *x.shape)
    if _sends(x):
        # PyTorch 2.13 renamed it, and warns about the old name.
        collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        collective(found.flatten(), x.contiguous().flatten(), group=group)
    return found


def all_gather_async(x: Tensor, group: Any) -> Tensor:
    """`all_gather` that returns before it has finished; x must be contiguous.

    Call `wait_gathered` on the result before reading it, and keep x alive until then. In between the device can run
    work that needs nothing from other ranks.
    """
    if torch.compiler.is_compiling():
        return all_gather(x, group)  # a compiler separates launch and wait itself
    import torch.distributed as dist

    world = dist.get_world_size(group)
    if not _sends(x):
        return x.new_empty(world, *x.shape)
    launch = torch.ops._c10d_functional.all_gather_into_tensor
    gathered: Tensor = launch(x.view(-1), world, group.group_name)
    return gathered.view(world, *x.shape)


def wait_gathered(x: Tensor) -> Tensor:
    """Wait for the result of a collective: work launched after this waits for it on the device. Return x."""
    if not torch.compiler.is_compiling():
        recording.wait_collective(x)
    return x


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
    launch = torch.ops._c10d_functional.all_to_all_single
    found: Tensor = launch(x.flatten(1).contiguous(), one_row_a_rank, one_row_a_rank, group.group_name)
    return wait_gathered(found).view(x.shape)


def _sends(x: Tensor) -> bool:
    """Whether x has elements to send, which is the same on every rank; record its bytes if so."""
    for sent in _counters if x.numel() else ():
        sent.append(x.numel() * x.element_size())
    return x.numel() > 0


def sum_over_ranks(x: Tensor, group: Any) -> Tensor:
    """Sum x over all ranks, in the same order on each, so that all get the same bits."""
    return torch.stack(list(all_gather(x, group))).sum(0)


def check_agreement(op: str, metadata: Mapping[str, object] | Exception, device: torch.device, group: Any) -> None:
    """Check that all ranks are about to run the same call, by one all-gather of a fixed size.

    Args:
        op: Operator's name, for messages.
        metadata: This rank's metadata by name, or the error that its own arguments raised.
        device: Device of the group's collectives.
        group: Process group.

    Raises:
        ValueError: metadata differ (on every rank), or another rank's arguments raised an error.
    """
    if isinstance(metadata, Exception):
        payload = json.dumps({_REFUSED: str(metadata)[: TEXT_BYTES // 8]}).encode()
    else:
        payload = json.dumps({key: short(x) for key, x in metadata.items()}).encode()
        if len(payload) > TEXT_BYTES:
            payload = json.dumps({"what was asked": short(payload.decode())}).encode()
    row = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
    row[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    rows = all_gather(row.to(device), group).cpu()
    received = [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in rows]
    if isinstance(metadata, Exception):
        return
    for rank, text_of in enumerate(received):
        if _REFUSED in text_of:
            raise ValueError(f"{op}: rank {rank} of the group refused its arguments: {text_of[_REFUSED]}")
    for key in dict.fromkeys(key for text_of in received for key in text_of):
        values = [text_of.get(key, "nothing") for text_of in received]
        if len(set(values)) > 1:
            raise ValueError(f"{op}: {key} must be the same on all ranks, got {_by_value(values)}")


def short(value: object, most: int = 300) -> str:
    """Return str(value), cut to `most` characters with a digest of the whole text if it is longer."""
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}.. ({digest(text)})"


def digest(text: str) -> str:
    """Eight hexadecimal digits that identify a text in a message."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _by_value(values: Sequence[str]) -> str:
    """'16 on ranks 0, 1; 32 on ranks 2'."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(
        f"{value} on rank{'s' * (len(ranks_of) > 1)} {', '.join(ranks_of)}" for value, ranks_of in ranks.items()
    )
