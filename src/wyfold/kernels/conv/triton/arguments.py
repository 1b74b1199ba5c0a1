"""Arguments of the convolution's kernels as records."""

from __future__ import annotations

from typing import Any, NamedTuple


class Inputs(NamedTuple):
    """Kernel argument: inputs of the convolution, each with its strides, or None.

    Attributes:
        x, s_x: [T, D] tokens.
        w, s_w, bias: Taps, and bias.
        state, s_state: [N, D, S] inputs before each sequence.
        residual, s_residual: [T, D], added to the result; None in the backward.
    """

    x: Any
    s_x: Any
    w: Any
    s_w: Any
    bias: Any
    state: Any
    s_state: Any
    residual: Any = None
    s_residual: Any = None
    end: None = None


class Outputs(NamedTuple):
    """Kernel argument: results that are written, each with its strides, or None."""

    y: Any
    s_y: Any
    final: Any
    s_final: Any
    end: None = None


class Gradients(NamedTuple):
    """Kernel argument: gradients, each with its strides, or None.

    Attributes:
        dy, s_dy, dfinal, s_dfinal: Of the results.
        dx, s_dx, dstate, s_dstate: Of the inputs, written.
        partial: [spans, W + 1, D] float32 sums of the gradients of taps and bias, written.
    """

    dy: Any
    s_dy: Any
    dfinal: Any
    s_dfinal: Any
    dx: Any
    s_dx: Any
    dstate: Any
    s_dstate: Any
    partial: Any
    end: None = None
