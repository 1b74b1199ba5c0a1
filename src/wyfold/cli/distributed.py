"""The processes of one training run: replicas of a model, each over the ranks of a context-parallel group.

    W processes = replicas x C;  process r holds share r % C of replica r // C

Parameters, gradients and moments are sharded over all of them (FSDP2). A process alone is a team of one, so that a
training loop need not ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from wyfold.context_parallel import collectives
from wyfold.context_parallel.context import build_cp_context
from wyfold.context_parallel.watchdog import Watch
from wyfold.runtime.layout import SequenceLayout


class Team:
    """A process by itself.

    Attributes:
        device: Of this process's model and batches.
        sharded: Whether the processes hold shards of parameters and moments.
        reads_behind: Whether what a step came to may be read while the next one runs: the device works by itself, and
            no other process has to be asked.
        rank, replicas, replica, cp: Number of the process; replicas of the model, and which one this process is of;
            ranks that share one replica's tokens.
    """

    rank, replicas, replica, cp = 0, 1, 0, 1
    sharded = False

    def __init__(self, device: torch.device):
        self.device = device
        self.reads_behind = device.type == "cuda"

    @property
    def processes(self) -> int:
        """Of the run."""
        return self.replicas * self.cp

    @property
    def leads(self) -> bool:
        """Whether this process writes and prints for all."""
        return self.rank == 0

    def agree(self, said: Mapping[str, object]) -> None:
        """Compare what every process was asked to do.

        Args:
            said: Name -> value; both come into the message.

        Raises:
            ValueError: a value differs between processes; on all of them.
        """

    def spread(self, model: nn.Module, parts: Iterable[nn.Module]) -> None:
        """Shard a model's parameters, those of each part together."""

    def reshard(self, model: nn.Module) -> None:
        """Free parameters that a forward pass gathered and no backward pass has freed, as after an evaluation.

        Until then `model.parameters()` are not those that the optimizer has.
        """

    def share(
        self, ids: Tensor, labels: Tensor, lengths: tuple[int, ...] | None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """This process's tokens of a replica's batch, and where they lie, as keywords of the decoder.

        Args:
            ids, labels: [B, T], the same on all ranks of the replica.
            lengths: Of the documents packed into the one row, or None.
        """
        layout = None if lengths is None else SequenceLayout.from_lengths(list(lengths), device=self.device)
        ids, labels = (x.to(self.device, non_blocking=True) for x in (ids, labels))
        return ids, labels, {"layout": layout}

    def backward(self, loss: Tensor) -> None:
        """Gradients of the mean loss of the replicas, from a rank's share of the loss of one."""
        # FSDP takes the mean over all processes, but what the ranks of one replica have are shares.
        (loss * self.cp).backward()

    def mean(self, loss: Tensor) -> Tensor:
        """The mean loss of the replicas, whose ranks each have a share of theirs."""
        return loss

    def whole(self, x: Tensor) -> Tensor:
        """All of a tensor that is sharded."""
        return x

    def held(self, x: Tensor) -> Tensor:
        """This process's part of a tensor that is sharded."""
        return x

    def like(self, x: Tensor, parameter: Tensor) -> Tensor:
        """x [..] sharded as a parameter of its shape is."""
        return x.to(self.device)

    def most(self, x: float) -> float:
        """The largest of what the processes pass: what they must agree on to go on alike."""
        return x

    def watched(self) -> AbstractContextManager[object]:
        """While it is entered, another process that is gone is a `RankLost` here."""
        return nullcontext()


class Ranks(Team):
    """One process among those that a launcher started.

    Args:
        device: Its kind is every process's; of several, each takes the one of its number on its machine.
        cp: Ranks that share one replica's tokens; None: all of them, which are one replica.

    Raises:
        ValueError: cp differs between processes, or does not divide their number.
    """

    sharded = True

    def __init__(self, device: torch.device, cp: int | None):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if device.type == "cuda":
            device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
            torch.cuda.set_device(device)
        super().__init__(device)
        self.reads_behind, self._asked = False, 0
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.agree({"cp": cp})
        cp = world if cp is None else cp
        if world % cp:
            raise ValueError(f"Ranks: cp must divide the number of processes, {world}, got {cp}")
        self.cp, self.replicas, self.replica = cp, world // cp, self.rank // cp
        self.group = init_device_mesh(device.type, (self.replicas, cp), mesh_dim_names=("replica", "cp"))["cp"]
        self.mesh = init_device_mesh(device.type, (world,))

    def agree(self, said: Mapping[str, object]) -> None:
        import torch.distributed as dist

        collectives.check_agreement("Ranks", said, self.device, dist.group.WORLD)

    def spread(self, model: nn.Module, parts: Iterable[nn.Module]) -> None:
        from torch.distributed.fsdp import fully_shard

        for part in parts:
            fully_shard(part, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)

    def reshard(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def share(
        self, ids: Tensor, labels: Tensor, lengths: tuple[int, ...] | None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        cu = None if lengths is None else SequenceLayout.from_lengths(list(lengths)).cu_seqlens
        context = build_cp_context(cu, self.group, total_tokens=ids.shape[1])
        mine, theirs = (context.shard(x).to(self.device) for x in (ids, labels))
        return mine, theirs, {"cp_context": context}

    def mean(self, loss: Tensor) -> Tensor:
        import torch.distributed as dist

        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / self.replicas

    def whole(self, x: Tensor) -> Tensor:
        full: Any = getattr(x, "full_tensor", None)
        return x if full is None else full()

    def held(self, x: Tensor) -> Tensor:
        local: Any = getattr(x, "to_local", None)
        return x if local is None else local()

    def like(self, x: Tensor, parameter: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(parameter, DTensor) or x.shape != parameter.shape:
            return x.to(self.device)
        return distribute_tensor(x.to(self.device), parameter.device_mesh, parameter.placements)

    def most(self, x: float) -> float:
        import torch.distributed as dist

        largest = torch.tensor(x, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.item()

    def watched(self) -> AbstractContextManager[object]:
        return Watch(self.mesh)

    def first(self, count: int) -> Any:
        """A group of so many processes, from 0 on. Every process has to ask for it, in the same order."""
        import torch.distributed as dist

        return dist.new_group(list(range(count)))

    def meet(self) -> None:
        """Wait for every process."""
        import torch.distributed as dist

        dist.barrier()

    def all_here(self, seconds: float) -> bool:
        """Whether every process asks this, as often as this one has, within so many seconds."""
        import torch.distributed as dist

        store: Any = dist.distributed_c10d._get_default_store()
        self._asked += 1
        words = [f"wyfold/team/{self._asked}/{rank}" for rank in range(self.processes)]
        store.set(words[self.rank], "")
        try:
            store.wait(words, timedelta(seconds=seconds))
        except dist.DistStoreError:
            return False
        return True

    def told(self, said: Any) -> list[Any]:
        """What every process says, by rank."""
        import torch.distributed as dist

        heard = [None] * self.processes
        dist.all_gather_object(heard, said)
        return heard


def launched() -> bool:
    """Whether a launcher such as torchrun started this process."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_torchelastic_launched()


def leave() -> None:
    """End what `Ranks` began."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
