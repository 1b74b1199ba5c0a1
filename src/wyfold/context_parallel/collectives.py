"""Collectives: what ranks tell each other, and whether they agree on what they are about to compute.

torch.distributed is imported when a context is made and never before: PyTorch can be built without it.
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

TEXT_BYTES = 2048  # of a description, or of a refusal; the size must not depend on what a rank has to say
_REFUSED = "refused"


def process_group(op: str, mesh_or_group: object) -> Any:
    """The process group of a mesh of one axis, or the group itself.

    Raises:
        TypeError: neither of them.
        ValueError: a mesh of more axes, a group this rank is no member of, or torch.distributed is not there.
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
    """This rank's number in the group, and the group's size."""
    import torch.distributed as dist

    return dist.get_rank(group), dist.get_world_size(group)


def after(x: Tensor, *others: Tensor | None) -> Tensor:
    """x, which a compiler must not compute before the others, nor without them.

    A rank may send what depends on nothing, and need nothing of what it is told. A compiler would then move the
    collective to where that rank has time for it, or from the backward into the forward, and other ranks wait.
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
def counted() -> Iterator[list[int]]:
    """Within, the bytes that this rank contributes to each collective."""
    sent: list[int] = []
    _counters.append(sent)
    try:
        yield sent
    finally:
        _counters.pop()


def all_gather(x: Tensor, group: Any) -> Tensor:
    """[world, *x.shape]: what every rank passed, in the order of ranks; the shape must be the same on all."""
    import torch.distributed as dist

    world = dist.get_world_size(group)
    found = x.new_empty(world, *x.shape)
    if _sends(x):
        # PyTorch 2.13 knows it by another name, and warns of the one it had.
        collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        collective(found.flatten(), x.contiguous().flatten(), group=group)
    return found


def all_gather_async(x: Tensor, group: Any) -> Tensor:
    """`all_gather` that returns before it has finished; x must be contiguous.

    Call `wait_gathered` on the result before reading it, and keep x alive until then. In between the device can run
    work that needs nothing from other ranks.
    """
    if torch.compiler.is_compiling():
        return all_gather(x, group)  # a compiler moves the two ends apart by itself
    import torch.distributed as dist

    world = dist.get_world_size(group)
    if not _sends(x):
        return x.new_empty(world, *x.shape)
    begun = torch.ops._c10d_functional.all_gather_into_tensor
    found: Tensor = begun(x.view(-1), world, group.group_name)
    return found.view(world, *x.shape)


def wait_gathered(x: Tensor) -> Tensor:
    """x, once all ranks have sent theirs; work that is launched after this waits for it on the device."""
    if not torch.compiler.is_compiling():
        recording.wait_collective(x)
    return x


def _sends(x: Tensor) -> bool:
    """Whether there is anything to tell, the same on every rank; if so it is counted."""
    for sent in _counters if x.numel() else ():
        sent.append(x.numel() * x.element_size())
    return x.numel() > 0


def sum_over_ranks(x: Tensor, group: Any) -> Tensor:
    """The sum of what every rank passed, in the same order on all of them."""
    return torch.stack(list(all_gather(x, group))).sum(0)


def check_agreement(op: str, said: Mapping[str, object] | Exception, device: torch.device, group: Any) -> None:
    """Compare what every rank is about to do; one collective, of one size whatever is said.

    Args:
        op: Operator's name, for messages.
        said: This rank's metadata by name, or the error with which it refused its own arguments.
        device: Where the group's collectives run.
        group: Process group.

    Raises:
        ValueError: on every rank if metadata differ, and on the others where a rank refused.
    """
    if isinstance(said, Exception):
        words = json.dumps({_REFUSED: str(said)[: TEXT_BYTES // 8]}).encode()
    else:
        words = json.dumps({key: short(x) for key, x in said.items()}).encode()
        if len(words) > TEXT_BYTES:
            words = json.dumps({"what was asked": short(words.decode())}).encode()
    row = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
    row[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    rows = all_gather(row.to(device), group).cpu()
    heard = [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in rows]
    if isinstance(said, Exception):
        return
    for rank, words_of in enumerate(heard):
        if _REFUSED in words_of:
            raise ValueError(f"{op}: rank {rank} of the group refused its arguments: {words_of[_REFUSED]}")
    for key in dict.fromkeys(key for words_of in heard for key in words_of):
        values = [words_of.get(key, "nothing") for words_of in heard]
        if len(set(values)) > 1:
            raise ValueError(f"{op}: {key} must be the same on all ranks, got {_by_value(values)}")


def short(value: object, most: int = 300) -> str:
    """A value in words of limited length: of a longer text its beginning, and a digest of the whole."""
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}.. ({digest(text)})"


def digest(text: str) -> str:
    """Eight digits that stand for a text in a message."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _by_value(values: Sequence[str]) -> str:
    """'16 on ranks 0, 1; 32 on ranks 2'."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(f"{value} on rank{'s' * (len(who) > 1)} {', '.join(who)}" for value, who in ranks.items())
