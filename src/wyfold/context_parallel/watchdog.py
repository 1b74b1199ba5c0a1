"""Watchdog of a process group: a lost rank becomes an exception on the others.

A collective on a GPU is a kernel that waits for every rank, and the host waits for that kernel where it reads a number.
After a rank has died neither returns. PyTorch's watchdog raises no exception: when the group's timeout and one more
minute are over, it ends the process by SIGABRT (docs/facts/host.md, NCCL-1).

So each rank of a watched group has a thread that exchanges heartbeats with the others through a separate gloo group,
without the GPU. The system closes the sockets of a process that dies in any way, and the others notice at their next
heartbeat. They determine the lost ranks through the group's store, raise an exception in the watched thread, and abort
the collectives that it may be waiting for.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from wyfold.context_parallel import collectives

PERIOD_S = 0.5  # between heartbeats
ROLL_S = 3.0  # within which the remaining ranks notice and answer
GRACE_S = 5.0  # for a rank to raise, by itself, the error because of which another one left
ABORT_S = 10.0  # for all aborted collectives to end

_HERE, _DONE, _FAILED = range(3)  # values of a heartbeat


class RankLost(RuntimeError):
    """A rank of a watched group is lost, and with it every collective of this process."""

    def __init__(self, text: str = "Watch: a rank of the group is gone"):
        super().__init__(text)


class Watch:
    """Context manager in which the loss of a rank raises `RankLost` on the other ranks.

    The exception is raised in the thread that entered, within about four seconds of a rank's death, at whatever
    statement it is. A thread that waits for a collective gets it as soon as the collective is aborted; one that sleeps
    or is inside another C function gets it afterwards. It is raised once: code that catches it continues unwatched, and
    in a destructor Python itself catches it. A rank that leaves by an exception is lost to the others too, unless they
    leave as well in the next five seconds. Each of them then keeps the exception it has, unless that is the broken
    connection.

    Watching ends for all ranks when the first one leaves, so leave together. A rank that leaves by an exception while
    another one is silent waits for its own next heartbeat, up to `silence_s`.

    All process groups of this process are aborted, because a kernel that waits in one group blocks those of the others.
    None can be used afterwards: let the process end without `destroy_process_group`. The results of an aborted
    collective are meaningless, also those that are read before the exception: NCCL may end a collective by itself. gloo
    cannot abort: there, a thread that waits for a rank that is stopped but not dead waits for its group's timeout.

    Entering is a collective of the hosts alone. Inside, the watch blocks neither host nor device; with one rank it does
    nothing. It detects that a rank is gone, but not that a rank makes another call: for that there are the comparison
    of `build_cp_context` and the group's timeout.

    Args:
        mesh_or_group: A `ProcessGroup`, or a `DeviceMesh` of one axis. Watch all processes that depend on each other:
            with FSDP all ranks, not only those that share a sequence.
        silence_s: Seconds without a heartbeat after which a rank counts as lost: its process or its host has stopped.
            A call that never releases Python's lock also keeps a rank silent.

    Attributes:
        lost: Description of the lost ranks; "" while there are none.

    Raises:
        TypeError, ValueError: as `build_cp_context` for its group; silence_s is not positive.
        RankLost: inside the block and at its end, never on entry.

    Examples:
        >>> import torch, wyfold.cp
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> with wyfold.cp.Watch(torch.distributed.group.WORLD) as watch:
        ...     pass  # train
        >>> watch.lost
        ''
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, mesh_or_group: object, *, silence_s: float = 60):
        self.group = collectives.process_group("Watch", mesh_or_group)
        if not silence_s > 0:
            raise ValueError(f"Watch: silence_s must be positive, got {silence_s}")
        self.rank, self.world = collectives.rank_and_size(self.group)
        self.silence_s, self.lost = silence_s, ""
        self._status, self._leaving, self._lock = _HERE, threading.Event(), threading.Lock()
        self._failed = ""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if self._thread is not None:
            raise ValueError("Watch: a watch is entered once; make another")
        if self.world == 1:
            return self
        import torch.distributed as dist

        # A separate connection: the watched thread may be waiting for an answer on the group's.
        store: Any = dist.distributed_c10d._world.pg_map[self.group][1]
        store = store.clone()
        turn = store.add(f"wyfold/watch/{self.rank}", 1)  # all ranks enter their watches in the same order
        self._roll_store = dist.PrefixStore(f"wyfold/watch/{turn}", store)
        self._roll_store.set(f"entered/{self.rank}", "")
        self._roll_store.wait([f"entered/{rank}" for rank in range(self.world)])
        channel = dist.ProcessGroupGloo(self._roll_store, self.rank, self.world, timedelta(seconds=self.silence_s))
        self._watched = threading.get_ident()
        name = f"wyfold watch, rank {self.rank}"
        self._thread = threading.Thread(target=self._exchange_heartbeats, args=(channel,), name=name, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        try:
            self._leave(error)
        except RankLost:  # raised by the watch's thread before this point
            self._leave(error)
        if not self.lost and self._failed and _disconnected(error):
            self.lost = self._failed
        if self.lost and (error is None or isinstance(error, Exception)):
            # The first error may come from NCCL, gloo or this watch; the caller always gets RankLost.
            raise RankLost(self.lost) from error

    def _leave(self, error: BaseException | None) -> None:
        """Send the other ranks that this one leaves, and wait until they have received it."""
        done = error is None or (isinstance(error, SystemExit) and not error.code)
        with self._lock:  # from here on no exception is raised in this thread
            self._status = _DONE if done else _FAILED
            self._leaving.set()
        if self._thread is not None:
            self._thread.join()

    def _exchange_heartbeats(self, channel: Any) -> None:
        """Exchange heartbeats in the watch's thread, one each period, until a rank leaves or is lost."""
        sent = torch.empty(self.world, dtype=torch.uint8, device="cpu")
        received = torch.empty_like(sent)
        while True:
            status = self._status
            sent.fill_(status)
            try:
                # Each rank receives from each other one, so all of them notice, whichever rank is lost.
                channel.alltoall_base(received, sent, [], []).wait()
            except RuntimeError as error:
                self._find_lost_ranks(error)
                return
            statuses = received.tolist()
            if any(statuses):  # every rank stops after this exchange
                with suppress(RuntimeError):
                    self._report_alive()
                failed = [rank for rank, other in enumerate(statuses) if other == _FAILED]
                if failed:
                    reason = f"{_format_ranks(failed)} of {self.world} left because of an error of its own"
                    self._failed = "" if self.rank in failed else f"Watch: {reason}"
                    if not self._leaving.wait(GRACE_S):
                        self._raise_lost(reason)
                return
            self._leaving.wait(PERIOD_S)

    def _report_alive(self) -> None:
        self._roll_store.set(f"answered/{self.rank}", "")

    def _find_lost_ranks(self, error: RuntimeError) -> None:
        """Determine which ranks are lost: a broken connection shows only that there is one."""
        absent, step_s = list(range(self.world)), PERIOD_S / 10
        try:
            self._report_alive()
            for _ in range(round(ROLL_S / step_s)):
                absent = [rank for rank in absent if not self._roll_store.check([f"answered/{rank}"])]
                if not absent:
                    break
                threading.Event().wait(step_s)
        except RuntimeError:
            reason = (
                "a rank of the group is gone, and the store that knew which one: likely the one that kept it, rank 0"
            )
        else:
            if not absent:
                # All ranks are alive, so none is stopped; only the watching ends.
                warnings.warn(f"Watch: its own connection failed, all ranks are here; it ends. {error}", stacklevel=1)
                return
            reason = f"{_format_ranks(absent)} of {self.world} is gone: ended, or silent for {self.silence_s:g} s"
        self._raise_lost(f"{reason} ({str(error).partition('. ')[0]})")

    def _raise_lost(self, reason: str) -> None:
        """Raise RankLost in the watched thread, and abort the collective that it may be waiting for."""
        self.lost = f"Watch: {reason}"
        with self._lock:
            if not self._leaving.is_set():
                thread, text = ctypes.c_ulong(self._watched), self.lost
                # The interpreter creates the exception without arguments, so the class has the message.
                kind = type("RankLost", (RankLost,), {"__init__": lambda lost: RankLost.__init__(lost, text)})
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(kind))
        _abort_all()


def _disconnected(error: BaseException | None) -> bool:
    """Whether the error is of a type that collectives raise when another rank has gone."""
    import torch.distributed as dist

    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks: 'rank 1', 'rank 1 and rank 3'."""
    return " and ".join(f"rank {rank}" for rank in ranks)


def _abort_all() -> None:
    """Abort the collectives of all groups of this process concurrently.

    Aborting a communicator waits for the device, and so for kernels of the other groups: one after another would block.
    """
    import torch.distributed as dist

    def abort(group: Any) -> None:
        with suppress(RuntimeError):  # the backend cannot abort, or it timed out
            group.abort()

    groups = list(dist.distributed_c10d._world.pg_names)
    threads = [threading.Thread(target=abort, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_S / len(threads))
