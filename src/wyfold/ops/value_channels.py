"""A decay per value channel, computed with a value head for each channel.

Columns of a state do not depend on each other, so a decay that differs from column to column is one decay per head of
heads that are one column wide.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.ops.delta_checks import check_boundaries
from wyfold.ops.delta_widths import WIDEST_VALUE
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout, boundaries_of

Result = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


class ValueChannels(NamedTuple):
    """A call whose value heads may be channels of the caller's.

    Attributes:
        v, g, states: Arguments of the call; HV is `parts` times the caller's.
        parts: Heads that one of the caller's value heads is divided into: one for each channel, or 1.
        v_first: Whether states are [V, K].
    """

    v: Tensor
    g: Tensor | None
    states: Tensor | None
    parts: int
    v_first: bool

    @property
    def channel(self) -> bool:
        """Whether g is one decay per key channel; the checks of a call then expect this shape."""
        return isinstance(self.g, Tensor) and self.g.ndim != 3

    def repeated(self, x: Tensor | None) -> Tensor | None:
        """A number per value head [B, T, HV], for each of its parts."""
        return x if x is None or self.parts == 1 else x.repeat_interleave(self.parts, 2)

    def joined(self, found: Result) -> Result:
        """The results, with the parts of each value head side by side."""
        if self.parts == 1:
            return found
        o, *states = found
        joined = [None if x is None else _join_states(x, self.parts, self.v_first) for x in states]
        return (_join(o, self.parts), *joined)  # type: ignore[return-value]


def split_value_channels(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    states: Tensor | None,
    v_first: bool,
    cu_seqlens: Tensor | SequenceLayout | None = None,
) -> ValueChannels:
    """Divide value heads that have a decay per channel into one for each channel; check what that needs.

    Other calls are checked as a whole later, where an error on one rank is raised on all.
    """
    if gv is None:
        return ValueChannels(v, g, states, 1, v_first)
    sizes = check.shapes(
        op,
        optional=("g", "gv"),
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T HV V"),
        g=(g, "B T HV" if isinstance(g, Tensor) and g.ndim == 3 else "B T HV K"),
        gv=(gv, "B T HV V"),
    )
    check.head_groups(op, sizes["H"], sizes["HV"])  # HV V may be a multiple of H where HV is not
    check.any_width(op, "V", "v", sizes["V"], most=WIDEST_VALUE)
    check.floating(op, v=v, g=g, gv=gv)
    check.same_attribute(op, "device", q=q, g=g, gv=gv)
    check.flag(op, state_v_first=v_first)
    cu, tokens = boundaries_of(cu_seqlens)
    N = check_boundaries(op, q, cu, tokens)
    for name, gate in (("g", g), ("gv", gv)):  # the call itself sees their sum alone
        if gate is not None:
            check.log_gates(op, gate, cu, name=name)
    if states is not None:
        order = "N HV V K" if v_first else "N HV K V"
        check.shapes(op, known={**sizes, "N": N}, initial_state=(states, order))
    parts = sizes["V"]
    return ValueChannels(
        _split(v, parts),
        _gate_of_parts(g, gv),
        None if states is None else _split_states(states, parts, v_first),
        parts,
        v_first,
    )


def _gate_of_parts(g: Tensor | None, gv: Tensor) -> Tensor:
    """Gate of the parts [B, T, HV V] or [B, T, HV V, K], in float32 or wider."""
    gv = gv.to(torch.promote_types(gv.dtype, torch.float32))
    if g is None:
        return gv.flatten(2, 3)
    total = g[..., None] + gv if g.ndim == 3 else g[..., None, :] + gv[..., None]
    return total.flatten(2, 3)


def _split(x: Tensor, parts: int) -> Tensor:
    """[.., HV, V] -> [.., HV parts, V / parts]."""
    return x.unflatten(-1, (parts, -1)).flatten(-3, -2)


def _join(x: Tensor, parts: int) -> Tensor:
    """The inverse of `_split`."""
    return x.unflatten(-2, (-1, parts)).flatten(-2)


def _split_states(x: Tensor, parts: int, v_first: bool) -> Tensor:
    """`_split` of states [.., HV, K, V], or [.., HV, V, K]."""
    columns = x.movedim(-2 if v_first else -1, -1).movedim(-2, 0)  # [K, .., HV, V]
    return _split(columns, parts).movedim(0, -1 if v_first else -2)


def _join_states(x: Tensor, parts: int, v_first: bool) -> Tensor:
    """The inverse of `_split_states`."""
    columns = x.movedim(-1, 0) if v_first else x.movedim(-2, 0)
    return _join(columns, parts).movedim(0, -1 if v_first else -2)
