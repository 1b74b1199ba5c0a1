"""What a call of the delta family is made of, and the sizes of its results and gradients; nothing is computed here."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from wyfold.runtime.options import DeltaOptions
from wyfold.tile.index.eager import wide


class DeltaTensors(NamedTuple):
    """Tensors of one call, as the public operators document them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    initial_state: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None

    @property
    def packed_sequences(self) -> int | None:
        """N of a packed batch; None for a dense one, where each row is a sequence."""
        return None if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


TENSORS, DIFFERENTIABLE = len(DeltaTensors._fields), 8
SUMMED = ("initial_state", "A_log", "dt_bias")


class DeltaResult(NamedTuple):
    """Output, final states and intermediate states of one call; empty where the options do not ask for them."""

    o: Tensor
    final_state: Tensor
    states: Tensor


class DeltaGradient(NamedTuple):
    """What the gradients of one call are made from.

    Attributes:
        tensors, options: The call's.
        saved: What the forward kept besides.
        do, dST: Gradients of the output and of the final states; None: zeros.
        needs: Of each differentiable tensor, whether its gradient is wanted.
    """

    tensors: DeltaTensors
    options: DeltaOptions
    saved: list[Tensor]
    do: Tensor | None
    dST: Tensor | None
    needs: list[bool]

    def rooms(self) -> list[Tensor]:
        """Unwritten memory for every wanted gradient: in the argument's dtype, but for states and parameters, which
        sum, in the wide one. No elements where none is wanted."""
        given = zip(self.tensors._fields, self.tensors, self.needs, strict=False)
        dtype = wide(self.tensors.q.dtype)
        return [
            x.new_empty(x.shape, dtype=dtype if name in SUMMED else x.dtype)
            if need and x is not None
            else self.tensors.q.new_empty(0)
            for name, x, need in given
        ]

    def rounded(self, found: list[Tensor]) -> list[Tensor]:
        """Every gradient in its argument's dtype."""
        given = self.tensors[:DIFFERENTIABLE]
        return [dx if x is None else dx.to(x.dtype) for dx, x in zip(found, given, strict=True)]


def empty_result(t: DeltaTensors, options: DeltaOptions) -> DeltaResult:
    """Unwritten results, and zeros for intermediate states, of which not every row will be written.

    Sizes come from metadata alone, so this is the operator's fake as well.
    """
    B, T, HV, V = t.v.shape
    K, N = t.q.shape[-1], t.packed_sequences
    state = (V, K) if options.state_v_first else (K, V)
    final = (B if N is None else N, HV, *state) if options.final_state else (0,)
    n = options.checkpoint_every
    rows = ((B, T // n) if N is None else (T // n,)) if n else (0,)
    return DeltaResult(
        t.v.new_empty(B, T, HV, V),
        t.v.new_empty(final, dtype=options.state_dtype),
        t.v.new_zeros(*rows, *((HV, *state) if n else ()), dtype=options.state_dtype),
    )


def turned(states: Tensor, options: DeltaOptions) -> Tensor:
    """A view of K-first states [.., K, V] in the caller's layout, and back."""
    return states.transpose(-1, -2) if options.state_v_first else states
