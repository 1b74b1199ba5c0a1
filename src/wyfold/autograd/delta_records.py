"""Records of one delta-family call, and allocation of its results, gradients and states at segments' borders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.runtime.chunk_layout import max_borders
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.index.eager import wide


class DeltaTensors(NamedTuple):
    """Tensors of one call, as the public operators document them, in the order of the registered operators' schema.

    Attributes:
        a, b, w: Further tokens of a diagonal-plus-low-rank rule, [B, T, heads, K], and of w [B, T, HV, V]; None where
            the rule does not have them (`tile.columns`).
    """

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
    a: Tensor | None = None
    b: Tensor | None = None
    w: Tensor | None = None

    def map_tokens(self, change: Callable[[Tensor], Tensor]) -> DeltaTensors:
        """Replace every tensor with a row for each token, [B, T, ...]."""
        optional = {name: getattr(self, name) for name in ("g", "beta", "a", "b", "w")}
        changed: dict[str, Any] = {name: None if x is None else change(x) for name, x in optional.items()}
        return self._replace(q=change(self.q), k=change(self.k), v=change(self.v), **changed)

    @property
    def packed_sequences(self) -> int | None:
        """N, the number of sequences of a packed batch; None for a dense batch, where each row is a sequence."""
        return None if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


TENSORS, DIFFERENTIABLE = len(DeltaTensors._fields), 8
LEARNING = (*range(DIFFERENTIABLE), *map(DeltaTensors._fields.index, ("a", "b", "w")))
"""Index of every differentiable tensor, in the order of gradients. The last three have some in low-rank rules alone."""
INITIAL_STATE = DeltaTensors._fields.index("initial_state")
ROWS = INITIAL_STATE
"""Number of the first tensors, which have a row for each token: q, k, v, g and beta."""
SUMMED = (INITIAL_STATE, DeltaTensors._fields.index("A_log"), DeltaTensors._fields.index("dt_bias"))


class DeltaResult(NamedTuple):
    """Results of one call.

    Attributes:
        o: [B, T, HV, V] output.
        final_state: [N, HV, K, V], or [N, HV, V, K] with `state_v_first`; (0,) if `final_state` is off.
        states: [B, T // n, HV, K, V] intermediate states with n = `checkpoint_every`; [T // n, HV, K, V] of a packed
            batch; V-first with `state_v_first`; (0,) if n is 0.
    """

    o: Tensor
    final_state: Tensor
    states: Tensor


def most_borders(t: DeltaTensors, options: DeltaOptions) -> int:
    """Upper bound on the borders between segments; 0 if no sequence can be long enough, or none is to be cut."""
    (B, T), packed = t.v.shape[:2], t.cu_seqlens is not None
    return max_borders(B, T, options.chunk_size, packed, options.cut)


def gradient_needs(options: DeltaOptions, needs_input_grad: Sequence[bool]) -> list[bool]:
    """`DeltaBackwardInputs.needs` of an autograd function whose first arguments are `DeltaTensors`."""
    learning = LEARNING[:DIFFERENTIABLE] if options.rule == "delta" else LEARNING
    return [needs_input_grad[index] for index in learning]


def as_input_grads(found: Sequence[Tensor | None], arguments: int) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments of such a function, None for those without one."""
    gradients: list[Tensor | None] = [None] * arguments
    for index, dx in zip(LEARNING, found, strict=False):
        gradients[index] = dx
    return tuple(gradients)


class DeltaBackwardInputs(NamedTuple):
    """Inputs of one backward call.

    Attributes:
        tensors, options: Those of the forward.
        saved: Tensors that the forward saved besides.
        do, dST: Gradients of the output and of the final states; None stands for zeros.
        needs: For each of `LEARNING`, whether its gradient is needed; for the first `DIFFERENTIABLE` of them if the
            options' rule is "delta".
        rows: Returns the memory of the gradients of q, k, v, g and beta, asked for where they are first written. None:
            it is allocated.
    """

    tensors: DeltaTensors
    options: DeltaOptions
    saved: list[Tensor]
    do: Tensor | None
    dST: Tensor | None
    needs: list[bool]
    rows: Callable[[], Sequence[Tensor]] | None = None

    def empty_grad(self, index: int) -> Tensor:
        """Allocate the gradient of tensor `LEARNING[index]`, uninitialized; without elements if it is not needed.

        It has the argument's dtype. Gradients of states and parameters are sums and have the wide dtype.
        """
        x = self.tensors[LEARNING[index]]
        if x is None or not self.needs[index]:
            return self.tensors.q.new_empty(0)
        if self.rows is not None and index < ROWS:
            return self.rows()[index]
        if index in SUMMED:
            return x.new_empty(x.shape, dtype=wide(self.tensors.q.dtype))
        return x.new_empty(x.shape)

    def empty_grads(self) -> list[Tensor]:
        """Allocate the gradient of every differentiable tensor, uninitialized."""
        return [self.empty_grad(index) for index in range(len(self.needs))]

    def needed(self, found: list[Tensor]) -> list[Tensor]:
        """The gradients that are needed, in their arguments' dtypes."""
        return [dx for dx, need in zip(self.to_input_dtypes(found), self.needs, strict=True) if need]

    def to_input_dtypes(self, found: list[Tensor]) -> list[Tensor]:
        """Cast every gradient to its argument's dtype."""
        given = [self.tensors[index] for index in LEARNING[: len(found)]]
        return [dx if x is None or dx.dtype == x.dtype else dx.to(x.dtype) for dx, x in zip(found, given, strict=True)]


def empty_result(t: DeltaTensors, options: DeltaOptions, out: Tensor | None = None) -> DeltaResult:
    """Allocate the results of a call: uninitialized, but intermediate states are zeros.

    Not every row of the intermediate states is written. Sizes follow from metadata alone, so this is the operator's
    fake implementation as well.

    Args:
        t, options: The call.
        out: Output buffer of the caller; None allocates one. With a buffer, intermediate states are not zeroed: this
            caller reads only the rows that are written.
    """
    B, T, HV, V = t.v.shape
    K, N = t.q.shape[-1], t.packed_sequences
    state = (V, K) if options.state_v_first else (K, V)
    final = (B if N is None else N, HV, *state) if options.final_state else (0,)
    o = t.v.new_empty(B, T, HV, V) if out is None else out
    final_state = t.v.new_empty(final, dtype=options.state_dtype)
    n = options.checkpoint_every
    if not n:
        return DeltaResult(o, final_state, t.v.new_empty(0, dtype=options.state_dtype))
    rows = (B, T // n) if N is None else (T // n,)
    make = t.v.new_zeros if out is None else t.v.new_empty
    return DeltaResult(o, final_state, make((*rows, HV, *state), dtype=options.state_dtype))


def empty_at_borders(t: DeltaTensors, options: DeltaOptions) -> list[Tensor]:
    """Allocate states at the segments' borders and maps of the segments before them, V-first; [] without borders."""
    borders, HV, K, V = most_borders(t, options), t.v.shape[2], t.q.shape[3], t.v.shape[3]
    if not borders:
        return []
    rows = [t.q.new_empty(borders, HV, width, K, dtype=torch.float32) for width in (V, K)]
    if options.save and t.cu_seqlens is not None:
        # Saved tensors must be deterministic, and not every row of a packed batch is written.
        for x in rows:
            x.zero_()
    return rows


def pass_through(states: Tensor | None, out: Tensor) -> None:
    """Copy states to out (zeros for None): without tokens, states and their gradients pass unchanged."""
    if states is None:
        out.zero_()
    else:
        out.copy_(states)


def transpose_if_v_first(states: Tensor, options: DeltaOptions) -> Tensor:
    """View states [.., K, V] in the caller's layout (V-first if `state_v_first`), and the caller's as [.., K, V]."""
    return states.transpose(-1, -2) if options.state_v_first else states
