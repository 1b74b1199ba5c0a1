"""Arguments of the kernel, and shared memory for numbers of rows."""

from __future__ import annotations

from typing import Any, NamedTuple


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory.

    Attributes:
        s_q, s_k: Strides of q and k.
        o, s_o: Output of the call, and its strides.
    """

    s_q: Any
    s_k: Any
    o: Any
    s_o: Any
    end: None = None


class RowFactors(NamedTuple):
    """Kernel argument: the fields of `Prepared` that are written through pointers."""

    rows: Any
    rows_bwd: Any
    total: Any


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles."""

    H: int
    HV: int
    K: int
    V: int
    BT: int
    BV: int


class RowNumbers(NamedTuple):
    """Shared memory for per-row numbers, [BT] each.

    Attributes:
        safe_beta: beta, held away from zero.
        inverse_beta: 1 / safe_beta.
        beta_mask: 1 where safe_beta is beta itself, else 0.
        G: Running sum of the log gate.
        r_k, r_q: Reciprocal norms of k and q.
    """

    safe_beta: Any
    inverse_beta: Any
    beta_mask: Any
    G: Any
    r_k: Any
    r_q: Any
