"""The processes of one training run: replicas of a model, each over the ranks of a context-parallel group.

    W processes = replicas x C;  process r has shard r % C of the tokens of replica r // C

Parameters, gradients and moments are sharded over all of them (FSDP2). A single process has the same interface,
`World`, so the training loop does not distinguish the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from wyfold.context_parallel.agreement import check_agreement
from wyfold.context_parallel.build_context import build_cp_context
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.watchdog import Watch
from wyfold.runtime.layout import SequenceLayout


class World:
    """The processes of a run; this class is a run of a single process.

    Attributes:
        device: Device of this process's model and batches.
        sharded: Whether the processes hold shards of parameters and moments.
        async_metrics: Whether the loss of a step may be read while the next step runs. Needs an asynchronous device;
            with other processes also a gloo backend, through which hosts agree without waiting for their devices.
        rank: Number of this process.
        replicas: Number of replicas of the model.
        replica: Replica of this process.
        cp: Number of ranks that share the tokens of one replica.
    """

    rank, replicas, replica, cp = 0, 1, 0, 1
    sharded = False

    def __init__(self, device: torch.device):
        self.device = device
        self.async_metrics = device.type == "cuda"

    @property
    def processes(self) -> int:
        """Number of processes of the run."""
        return self.replicas * self.cp

    @property
    def is_main(self) -> bool:
        """Whether this process, rank 0, writes files and prints for all."""
        return self.rank == 0

    def require_equal(self, values: Mapping[str, object]) -> None:
        """Require equal options on all processes.

        Args:
            values: Name -> value; the message has both.

        Raises:
            ValueError: a value differs between processes; raised on all of them.
        """

    def shard_model(self, model: nn.Module, parts: Iterable[nn.Module]) -> None:
        """Shard the parameters of a model; those of each part are gathered together."""

    def reshard(self, model: nn.Module) -> None:
        """Free parameters that a forward pass gathered and no backward pass has freed, as after an evaluation.

        Before this call, `model.parameters()` are not the parameters that the optimizer holds.
        """

    def local_batch(
        self, ids: Tensor, labels: Tensor, lengths: tuple[int, ...] | None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Move this process's shard of a batch to the device.

        Args:
            ids, labels: [B, T], the same on all ranks of the replica.
            lengths: Lengths of the documents packed into the one row, or None.

        Returns:
            ids and labels of this process, and the keywords of the decoder that describe their layout.
        """
        layout = None if lengths is None else SequenceLayout.from_lengths(list(lengths), device=self.device)
        ids, labels = (x.to(self.device, non_blocking=True) for x in (ids, labels))
        return ids, labels, {"layout": layout}

    def backward(self, loss: Tensor) -> None:
        """Backward of the mean loss of the replicas, given this rank's share of its replica's loss."""
        # FSDP averages over all processes, but the ranks of one replica have shares of one loss, which must be summed.
        # A single process stays on this thread: the second one makes the host slower (docs/facts/host.md, HOST-5).
        with torch.autograd.set_multithreading_enabled(self.processes > 1):
            (loss * self.cp).backward()

    def mean_loss(self, loss: Tensor) -> Tensor:
        """Mean loss of the replicas, given this rank's share of its replica's loss."""
        return loss

    def full_tensor(self, x: Tensor) -> Tensor:
        """Gather a sharded tensor."""
        return x

    def local_tensor(self, x: Tensor) -> Tensor:
        """Shard of this process of a sharded tensor."""
        return x

    def shard_like(self, x: Tensor, parameter: Tensor) -> Tensor:
        """Shard x like a parameter of the same shape, on the device."""
        return x.to(self.device)

    def all_reduce_max(self, x: float) -> float:
        """Maximum of x over the processes. Also a barrier."""
        return x

    def watch(self) -> AbstractContextManager[object]:
        """Context manager that raises `RankLost` when another process is gone."""
        return nullcontext()


class DistributedWorld(World):
    """One of several processes that a launcher started.

    Args:
        device: Only its type is used. On CUDA each process takes the device of its local rank.
        cp: Number of ranks that share the tokens of one replica; None for a single replica over all processes.

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
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        # Of a group that someone else made, the hosts may have no backend.
        by_host = device.type == "cpu" or "cpu:gloo" in str(dist.get_backend_config())
        self._host = torch.device("cpu") if by_host else device
        self.async_metrics, self._arrivals = device.type == "cuda" and by_host, 0
        self._contexts: dict[int, ContextParallel] = {}
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.require_equal({"cp": cp})
        cp = world if cp is None else cp
        if world % cp:
            raise ValueError(f"processes: cp must divide the number of processes, {world}, got {cp}")
        self.cp, self.replicas, self.replica = cp, world // cp, self.rank // cp
        self.group = init_device_mesh(device.type, (self.replicas, cp), mesh_dim_names=("replica", "cp"))["cp"]
        self.mesh = init_device_mesh(device.type, (world,))

    def require_equal(self, values: Mapping[str, object]) -> None:
        import torch.distributed as dist

        check_agreement("processes", values, self.device, dist.group.WORLD)

    def shard_model(self, model: nn.Module, parts: Iterable[nn.Module]) -> None:
        from torch.distributed.fsdp import fully_shard

        for part in parts:
            fully_shard(part, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)

    def reshard(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def local_batch(
        self, ids: Tensor, labels: Tensor, lengths: tuple[int, ...] | None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        # Whole rows are copied: a shard of several pinned rows is not contiguous, and its copy would wait.
        mine, theirs = (x.to(self.device, non_blocking=True) for x in (ids, labels))
        context = self._context(ids.shape[1], lengths)
        return context.shard(mine), context.shard(theirs), {"cp_context": context}

    def _context(self, tokens: int, lengths: tuple[int, ...] | None) -> ContextParallel:
        """Partition of rows; that of independent rows is kept, with its tables and what ranks have compared."""
        if lengths is not None:
            cu = SequenceLayout.from_lengths(list(lengths)).cu_seqlens
            return build_cp_context(cu, self.group, total_tokens=tokens)
        if tokens not in self._contexts:
            self._contexts[tokens] = build_cp_context(None, self.group, total_tokens=tokens)
        return self._contexts[tokens]

    def mean_loss(self, loss: Tensor) -> Tensor:
        import torch.distributed as dist

        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / self.replicas

    def full_tensor(self, x: Tensor) -> Tensor:
        full: Any = getattr(x, "full_tensor", None)
        return x if full is None else full()

    def local_tensor(self, x: Tensor) -> Tensor:
        local: Any = getattr(x, "to_local", None)
        return x if local is None else local()

    def shard_like(self, x: Tensor, parameter: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(parameter, DTensor) or x.shape != parameter.shape:
            return x.to(self.device)
        return distribute_tensor(x.to(self.device), parameter.device_mesh, parameter.placements)

    def all_reduce_max(self, x: float) -> float:
        import torch.distributed as dist

        largest = torch.tensor(x, dtype=torch.float64, device=self._host)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.item()

    def watch(self) -> AbstractContextManager[object]:
        return Watch(self.mesh)

    def group_of_first(self, count: int) -> Any:
        """Process group of the first `count` ranks. Every process must call this, in the same order."""
        import torch.distributed as dist

        return dist.new_group(list(range(count)))

    def barrier(self) -> None:
        """Barrier of all processes."""
        import torch.distributed as dist

        dist.barrier()

    def all_arrived(self, seconds: float) -> bool:
        """Whether every process makes this call, for the same number of times, within `seconds`."""
        import torch.distributed as dist

        store: Any = dist.distributed_c10d._get_default_store()
        self._arrivals += 1
        words = [f"wyfold/arrived/{self._arrivals}/{rank}" for rank in range(self.processes)]
        store.set(words[self.rank], "")
        try:
            store.wait(words, timedelta(seconds=seconds))
        except dist.DistStoreError:
            return False
        return True

    def gather_objects(self, values: Any) -> list[Any]:
        """All-gather of a picklable value, by rank."""
        import torch.distributed as dist

        gathered = [None] * self.processes
        dist.all_gather_object(gathered, values)
        return gathered


def launched() -> bool:
    """Whether a launcher such as torchrun started this process."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_torchelastic_launched()


def process_device(name: str) -> str:
    """Name of this process's device: that of its local rank if a launcher started one process per GPU."""
    import torch.distributed as dist

    if name != "cuda" or not launched():
        return name
    return f"cuda:{dist.get_node_local_rank(fallback_rank=0)}"


def leave() -> None:
    """Destroy the process group that `DistributedWorld` made."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
