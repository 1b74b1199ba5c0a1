"""Ranks that are gone: an exception on those that are left.

A collective on a GPU is a kernel that waits for every rank, and the host waits for that kernel where it reads a number.
After a rank has died neither comes back, and PyTorch's watchdog raises nothing: when the group's timeout and one more
minute are over it ends the process by SIGABRT (docs/facts/host.md, NCCL-1). So each rank of a watched group has a
thread that tells those of the others that it is here, past the GPU, through a gloo group of its own. A process that
dies, in whatever way, has its sockets closed by the system, and the others find out at their next word. They call the
roll in the group's store, have the thread raise that is being watched, and abort the collectives that it may be
waiting for.
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

PERIOD_S = 0.5  # between words
ROLL_S = 3.0  # in which those that are here have found out and answered
GRACE_S = 5.0  # for a rank to meet, by itself, the error for which another one has left
ABORT_S = 10.0  # for all collectives to end that are aborted

_HERE, _DONE, _FAILED = range(3)  # what ranks tell each other


class RankLost(RuntimeError):
    """A rank of a watched group is gone, and with it every collective of this process."""

    def __init__(self, text: str = "Watch: a rank of the group is gone"):
        super().__init__(text)


class Watch:
    """While it is entered: a rank that is gone is a `RankLost` on the others.

    It is raised in the thread that entered, within about four seconds of a rank's death, wherever that thread is by
    then; where it waits for a collective, as soon as that is aborted. Once: what catches it goes on unwatched, and in a
    destructor Python itself does. A rank that leaves by an exception is lost to the others too, unless they leave as
    well in the next five seconds: each of them then keeps the exception it has, if it is not the broken connection.

    Watching ends for all of them when the first rank leaves, so leave together. A rank that leaves by an exception
    while another one is silent waits for its own next word, up to `silence_s`.

    All process groups of this process are aborted, for a kernel that waits in one of them keeps those of the others
    waiting, and none can be used afterwards: let the process end, without `destroy_process_group`. Numbers that came
    out of an aborted collective are meaningless. gloo has nothing to abort by: there a thread that waits for a rank
    that is stopped and not dead, waits for its group's timeout.

    Entering it is a collective, of the host alone. Inside nothing waits for it, and the device does not know of it;
    with one rank it does nothing. It sees that a rank is gone, not that a rank does something else: that is left to
    the comparison of `build_cp_context` and to the group's timeout.

    Args:
        mesh_or_group: A `ProcessGroup`, or a `DeviceMesh` of one axis. Watch all processes that depend on each other:
            with FSDP everyone, not only those that share a sequence.
        silence_s: A rank of which nothing is heard for so long is gone as well: stopped, or its host is. A call that
            never lets go of Python's lock keeps a rank silent too.

    Attributes:
        lost: What is known of the ranks that are gone; "" while all are here.

    Raises:
        TypeError, ValueError: as `build_cp_context` of its group; silence_s is not positive.
        RankLost: on entry to `with`, never; inside of it and at its end.

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
        self._word, self._leaving, self._lock = _HERE, threading.Event(), threading.Lock()
        self._failed = ""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if self._thread is not None:
            raise ValueError("Watch: a watch is entered once; make another")
        if self.world == 1:
            return self
        import torch.distributed as dist

        # A connection of its own: the watched thread may be waiting for an answer on the group's.
        store: Any = dist.distributed_c10d._world.pg_map[self.group][1]
        store = store.clone()
        turn = store.add(f"wyfold/watch/{self.rank}", 1)  # ranks enter their watches in one order
        self._roll = dist.PrefixStore(f"wyfold/watch/{turn}", store)
        self._roll.set(f"entered/{self.rank}", "")
        self._roll.wait([f"entered/{rank}" for rank in range(self.world)])
        channel = dist.ProcessGroupGloo(self._roll, self.rank, self.world, timedelta(seconds=self.silence_s))
        self._watched = threading.get_ident()
        name = f"wyfold watch, rank {self.rank}"
        self._thread = threading.Thread(target=self._listen, args=(channel,), name=name, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        try:
            self._leave(error)
        except RankLost:  # on its way since before
            self._leave(error)
        if not self.lost and self._failed and _disconnected(error):
            self.lost = self._failed
        if self.lost and (error is None or isinstance(error, Exception)):
            # What the thread met first, of NCCL, of gloo or of this watch, is one thing to whoever reads it.
            raise RankLost(self.lost) from error

    def _leave(self, error: BaseException | None) -> None:
        """Say so to the others, and wait until they have heard it."""
        done = error is None or (isinstance(error, SystemExit) and not error.code)
        with self._lock:  # from here on nothing is raised in this thread any more
            self._word = _DONE if done else _FAILED
            self._leaving.set()
        if self._thread is not None:
            self._thread.join()

    def _listen(self, channel: Any) -> None:
        """Of the watch's own thread: say and hear a word in each period until some rank leaves, or is gone."""
        said = torch.empty(self.world, dtype=torch.uint8, device="cpu")
        heard = torch.empty_like(said)
        while True:
            word = self._word
            said.fill_(word)
            try:
                # Each rank hears from each other one, so all of them find out, whoever is gone.
                channel.alltoall_base(heard, said, [], []).wait()
            except RuntimeError as error:
                self._call_the_roll(error)
                return
            words = heard.tolist()
            if any(words):  # the same exchange was every rank's last
                with suppress(RuntimeError):
                    self._answer()
                failed = [rank for rank, other in enumerate(words) if other == _FAILED]
                if failed:
                    who = f"{_named(failed)} of {self.world} left because of an error of its own"
                    self._failed = "" if self.rank in failed else f"Watch: {who}"
                    if not self._leaving.wait(GRACE_S):
                        self._lose(who)
                return
            self._leaving.wait(PERIOD_S)

    def _answer(self) -> None:
        self._roll.set(f"answered/{self.rank}", "")

    def _call_the_roll(self, error: RuntimeError) -> None:
        """Find out who is gone: a broken connection says only that somebody is."""
        absent, step_s = list(range(self.world)), PERIOD_S / 10
        try:
            self._answer()
            for _ in range(round(ROLL_S / step_s)):
                absent = [rank for rank in absent if not self._roll.check([f"answered/{rank}"])]
                if not absent:
                    break
                threading.Event().wait(step_s)
        except RuntimeError:
            who = "a rank of the group is gone, and the store that knew which one: likely the one that kept it, rank 0"
        else:
            if not absent:
                # All of them live, so nobody is to be stopped; only nobody is watched any more.
                warnings.warn(f"Watch: its own connection failed, all ranks are here; it ends. {error}", stacklevel=1)
                return
            who = f"{_named(absent)} of {self.world} is gone: ended, or silent for {self.silence_s:g} s"
        self._lose(f"{who} ({str(error).partition('. ')[0]})")

    def _lose(self, who: str) -> None:
        """Raise in the watched thread, and set it free where it waits for a collective."""
        self.lost = f"Watch: {who}"
        with self._lock:
            if not self._leaving.is_set():
                thread, text = ctypes.c_ulong(self._watched), self.lost
                # The interpreter makes the exception itself, of a class that knows what to say.
                kind = type("RankLost", (RankLost,), {"__init__": lambda lost: RankLost.__init__(lost, text)})
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(kind))
        _abort_all()


def _disconnected(error: BaseException | None) -> bool:
    """Whether that is what collectives raise where another rank has gone."""
    import torch.distributed as dist

    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _named(ranks: Iterable[int]) -> str:
    """'rank 1', 'rank 1 and rank 3'."""
    return " and ".join(f"rank {rank}" for rank in ranks)


def _abort_all() -> None:
    """Abort the collectives of all groups of this process, side by side.

    A communicator waits, while it is aborted, for the device, and so for kernels of the others: one after another none
    would get anywhere.
    """
    import torch.distributed as dist

    def abort(group: Any) -> None:
        with suppress(RuntimeError):  # this backend cannot, or it has taken too long
            group.abort()

    groups = list(dist.distributed_c10d._world.pg_names)
    threads = [threading.Thread(target=abort, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_S / len(threads))
