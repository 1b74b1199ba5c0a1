"""Arguments of the kernels of `ttt` as records."""

from __future__ import annotations

from typing import Any, NamedTuple


class Inputs(NamedTuple):
    """Kernel argument: `TTTInputs`, each with its strides; None where a kernel does not read one."""

    q: Any = None
    s_q: Any = None
    k: Any = None
    s_k: Any = None
    v: Any = None
    s_v: Any = None
    w: Any = None
    s_w: Any = None
    u: Any = None
    s_u: Any = None
    eta: Any = None
    s_eta: Any = None
    col: Any = None
    s_col: Any = None
    end: None = None


class Borders(NamedTuple):
    """Kernel argument: fields of `SegmentBorders`; None where a kernel does not use one.

    Attributes:
        N, s_N, S, c, X: As in `SegmentBorders`, and strides of N, which are those of X too.
        rows, s_rows: Numbers per token, and their strides.
    """

    N: Any = None
    s_N: Any = None
    S: Any = None
    c: Any = None
    X: Any = None
    rows: Any = None
    s_rows: Any = None
    end: None = None


class States(NamedTuple):
    """Kernel argument: states and biases, each with its strides, or None.

    Attributes:
        S0, s_S0, c0, s_c0: Initial states.
        ST, s_ST, cT, s_cT: Final states, written.
    """

    S0: Any = None
    s_S0: Any = None
    c0: Any = None
    s_c0: Any = None
    ST: Any = None
    s_ST: Any = None
    cT: Any = None
    s_cT: Any = None
    end: None = None


class Scratch(NamedTuple):
    """Kernel argument: fields of `BackwardWorkspace`; None where a kernel does not use one.

    Attributes:
        dO, dN, dZ, s_tile: As in `BackwardWorkspace`, and the strides of all three.
        step, s_row: Numbers per token, and their strides.
        dS, dc: As in `BackwardWorkspace`.
        partials: Partial sums of dw and du, written.
    """

    dO: Any = None
    dN: Any = None
    dZ: Any = None
    s_tile: Any = None
    step: Any = None
    s_row: Any = None
    dS: Any = None
    dc: Any = None
    partials: Any = None
    end: None = None


class ScanGradients(NamedTuple):
    """Kernel argument: gradients of factors and states, each with its strides, or None.

    Attributes:
        dcol, s_dcol: Gradient of `col`, written.
        dST, s_dST, dcT, s_dcT: Gradients of the final states.
        dS0, s_dS0, dc0, s_dc0: Gradients of the initial states, written.
    """

    dcol: Any
    s_dcol: Any
    dST: Any
    s_dST: Any
    dcT: Any
    s_dcT: Any
    dS0: Any
    s_dS0: Any
    dc0: Any
    s_dc0: Any
    end: None = None
