"""Key and value widths that kernels lack, computed with widths that they have.

Zeros appended to the rows of q and k change neither their products nor their norms, and the rows of the state that
belong to them stay zero. The columns of a state do not depend on each other, so a wide value head can be computed as
several narrow ones that read the same key head. Autograd cuts and adds the gradients. Kernels of diagonal-plus-low-rank
rules need that above `WIDEST_LOW_RANK`.

Some widths are computed with others that kernels have too, because those are faster: keys of 96 channels as 128, wide
values as several heads of 128 (`best_head_width` in `wyfold.ops.delta_plan`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from wyfold.autograd.delta_records import DeltaTensors
from wyfold.runtime.kernel_configs import tile_width

MULTIPLE = 8
"""Widths of kernels are multiples of it."""
WIDEST_KEY, WIDEST_VALUE = 256, 512
"""Largest widths of a call."""
WIDEST_LOW_RANK = 256
"""Largest width V of a kernel of a diagonal-plus-low-rank rule."""


class Widths(NamedTuple):
    """Widths of a call and of its kernels.

    Attributes:
        K, V: Widths of the caller's keys and values.
        key: Width of the kernels' keys.
        value: Width of the kernels' values.
        parts: Number of value heads that the kernels have for one of the caller's.
    """

    K: int
    V: int
    key: int
    value: int
    parts: int

    def __str__(self) -> str:
        keys = [] if self.key == self.K else [f"K {self.K} as {self.key}"]
        values = [] if self.value == self.V else [f"V {self.V} as {self.parts} x {self.value}"]
        return ", ".join(keys + values)


def fitted(t: DeltaTensors, rule: str, *, v_first: bool, head_width: int = 0) -> tuple[DeltaTensors, Widths | None]:
    """Tensors of a checked call with the kernels' widths and heads, and both widths; None if kernels have the caller's.

    Args:
        rule: As of `DeltaFlags`; with "keys", b and w have value heads.
        v_first: States are [V, K].
        head_width: As of `DeltaOptions`.
    """
    K, V = t.q.shape[-1], t.v.shape[-1]
    widest = WIDEST_VALUE if rule == "delta" else WIDEST_LOW_RANK
    if head_width:
        widths = Widths(K, V, tile_width(K), head_width, -(-V // head_width))
    elif K % MULTIPLE == 0 and V % MULTIPLE == 0 and V <= widest:
        return t, None
    else:
        parts = -(-V // widest)
        widths = Widths(K, V, _rounded(K), _rounded(-(-V // parts)), parts)
    channel, keys = t.g is not None and t.g.ndim == 4, widths.key - widths.K
    g = _padded(t.g, keys) if t.g is not None and channel else t.g
    dt_bias = t.dt_bias
    if dt_bias is not None and channel:
        dt_bias = _padded(dt_bias.view(-1, widths.K), keys)
    a, b = (None if x is None else _padded(x, keys) for x in (t.a, t.b))
    fit = t._replace(
        q=_padded(t.q, keys),
        k=_padded(t.k, keys),
        v=_narrow_values(t.v, widths),
        g=_repeated(g, widths, 2),
        beta=_repeated(t.beta, widths, 2),
        initial_state=None if t.initial_state is None else _narrow_states(t.initial_state, widths, v_first),
        A_log=None if t.A_log is None else _repeated(t.A_log.flatten(), widths, 0),
        dt_bias=_repeated(dt_bias, widths, 0),
        a=a,
        b=_repeated(b, widths, 2) if rule == "keys" else b,
        w=None if t.w is None else _narrow_values(t.w, widths),
    )
    return fit, widths


def restored(
    o: Tensor, final_state: Tensor | None, states: Tensor | None, widths: Widths | None, *, v_first: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, final state and intermediate states with the caller's widths and heads."""
    if widths is None:
        return o, final_state, states
    whole = o.unflatten(2, (-1, widths.parts)).flatten(3, 4)
    cut = whole[..., : widths.V].contiguous()
    return cut, _wide_states(final_state, widths, v_first), _wide_states(states, widths, v_first)


def _rounded(width: int) -> int:
    return -(-width // MULTIPLE) * MULTIPLE


def _padded(x: Tensor, zeros: int) -> Tensor:
    """Rows with zeros appended; x itself, not a copy, if there are none.

    The gradient of a concatenation is a view, where that of `pad` is a copy. It is fast for contiguous rows alone.
    """
    return torch.cat((x.contiguous(), x.new_zeros(*x.shape[:-1], zeros)), -1) if zeros else x


def _repeated(x: Tensor | None, widths: Widths, dim: int) -> Tensor | None:
    """A tensor with an entry for each of the kernels' value heads."""
    return x if x is None or widths.parts == 1 else x.repeat_interleave(widths.parts, dim)


def _narrow_values(x: Tensor, widths: Widths) -> Tensor:
    """[B, T, HV, V] -> rows for each of the kernels' value heads."""
    x = _padded(x, widths.parts * widths.value - widths.V)
    return x.unflatten(-1, (widths.parts, widths.value)).flatten(2, 3)


def _narrow_states(x: Tensor, widths: Widths, v_first: bool) -> Tensor:
    """[N, HV, K, V] or [N, HV, V, K] -> one state for each of the kernels' value heads."""
    keys, values = widths.key - widths.K, widths.parts * widths.value - widths.V
    x = pad(x, (0, keys, 0, values) if v_first else (0, values, 0, keys))
    x = x.unflatten(2 if v_first else 3, (widths.parts, widths.value))
    return (x if v_first else x.movedim(3, 2)).flatten(1, 2)


def _wide_states(x: Tensor | None, widths: Widths, v_first: bool) -> Tensor | None:
    """[..., heads, K, V] or [..., heads, V, K] of the kernels -> of the caller; None for None."""
    if x is None:
        return None
    x = x.unflatten(-3, (-1, widths.parts))
    if v_first:
        return x.flatten(-3, -2)[..., : widths.V, : widths.K].contiguous()
    return x.movedim(-3, -2).flatten(-2)[..., : widths.K, : widths.V].contiguous()
