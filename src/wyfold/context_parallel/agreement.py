"""Comparison of calls between ranks: all of them must make the same call, before any of them runs it.

Ranks all-gather the metadata of a call as text, once for each kind of call. A rank that refuses its own arguments
gathers its error instead, so that the others do not wait for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from wyfold.context_parallel.collectives import all_gather
from wyfold.runtime import check
from wyfold.runtime.plan import explaining

CHECKS = ("first", "always", "never")
TEXT_BYTES = 2048  # of a description or an error; a fixed size, because every rank must gather the same shape
_REFUSED = "refused"


class Agreement:
    """What the ranks of a context have compared.

    Args:
        group: The process group.
        when: One of `CHECKS`, as of `build_cp_context`.
        partition: Description of the context's partition; part of every comparison.
    """

    def __init__(self, group: Any, when: str, partition: str):
        self.group, self.when, self.partition = group, when, partition
        self.skipping = False
        self.agreed: set[tuple[object, ...]] = set()
        self.passed: set[tuple[str, Hashable]] = set()  # operators, and kinds of their calls, that passed the checks

    @contextmanager
    def skip(self) -> Iterator[None]:
        """Skip the comparison for calls in the block, which follow from metadata that ranks have already compared.

        Calls are still compared with "always", or if contents are checked, which may be wrong on one rank alone.
        """
        before = self.skipping
        self.skipping = self.when == "first" and not check.checking_contents()
        try:
            yield
        finally:
            self.skipping = before


class RankedCall:
    """A call over ranks: context manager for the checks of this rank's arguments, and the comparison between ranks.

        with RankedCall(agreement, op, device, kind) as ranked:
            ...                         # an error reaches the other ranks, if they compare this kind of call
        if ranked.compares:
            ranked.assert_same({...})   # what must be equal on all ranks, by name

    Args:
        agreement: Of the call's context.
        op: Operator's name.
        device: Device of the group's collectives.
        kind: Metadata that can be read before the checks. Calls of different kinds differ in the compared metadata too.
            None: all calls are of one kind.
    """

    def __init__(self, agreement: Agreement, op: str, device: torch.device, kind: Hashable):
        self.agreement, self.op, self.device, self.kind = agreement, op, device, kind

    @property
    def compares(self) -> bool:
        """Whether ranks compare calls at all: not while they are compiled or explained, and not with "never"."""
        off = self.agreement.when == "never" or torch.compiler.is_compiling()
        return not (off or self.device.type == "meta" or explaining())

    def __enter__(self) -> RankedCall:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, TypeError | ValueError) or not self.compares:
            return
        # With "first", ranks that have compared this kind go straight to the operator's own collective, which would
        # read an error message as numbers. The error is then raised on this rank alone.
        known = (self.op, None if self.kind is None else self._kind()) in self.agreement.passed
        if not self.agreement.skipping and (self.agreement.when == "always" or not known):
            check_agreement(self.op, error, self.device, self.agreement.group)

    def assert_same(self, metadata: Mapping[str, object] | None) -> None:
        """Check that all ranks make this call.

        Args:
            metadata: What must be equal on all ranks, by name. None: this call compares nothing, because the operator
                that follows does; an error of the block still reaches the ranks that compare there.

        Raises:
            ValueError: metadata differ between ranks, or another rank refused its arguments.
        """
        if not self.compares:
            return
        agreement = self.agreement
        if metadata is not None:
            compared = self.op, *metadata.values()
            if not agreement.skipping and (agreement.when == "always" or compared not in agreement.agreed):
                everything = {"the operator": self.op, **metadata, "the cut": agreement.partition}
                check_agreement(self.op, everything, self.device, agreement.group)
            agreement.agreed.add(compared)
        agreement.passed |= {(self.op, None), (self.op, self._kind())}

    def _kind(self) -> Hashable:
        return self.kind, torch.is_grad_enabled()


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
