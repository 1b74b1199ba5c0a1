"""TTT-Linear for serving: a registered operator that processes one token of every row and updates states in pools."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from wyfold.kernels import table
from wyfold.kernels.records import Slots
from wyfold.kernels.ttt_decode import Pools
from wyfold.kernels.ttt_records import TTTInputs
from wyfold.runtime.torch_ops import register


class TTTServing(NamedTuple):
    """One call, as the public operator documents its tensors.

    Attributes:
        q, k, v, eta, eta_col: [N, 1, ..], one token of each row; eta_col may be None.
        w, b: [HV, V].
        state, bias, grad, bias_grad, position: Pools, updated in place.
        source: [N, 1] slot of each row, or None.
        o: [N, 1, HV, V] output buffer.
        pad: Slot numbers up to this one mark padding.
        residual, scale, eps, chunk_size: As of `TTTOptions`.
        backend: Backend of the plan.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor
    eta_col: Tensor | None
    w: Tensor
    b: Tensor
    state: Tensor
    bias: Tensor
    grad: Tensor
    bias_grad: Tensor
    position: Tensor
    source: Tensor | None
    o: Tensor
    pad: int
    residual: str
    scale: float
    eps: float
    chunk_size: int
    backend: str


def _serve(*arguments: Any) -> None:
    s = TTTServing(*arguments)
    if s.v.numel() == 0:
        return
    stage: Any = table.kernel_module("ttt_decode", s.backend)
    tokens = TTTInputs(s.q, s.k, s.v, s.w, s.b, s.eta, s.eta_col, s.residual)
    pools = Pools(s.state, s.bias, s.grad, s.bias_grad, s.position)
    stage.ttt_decode(tokens, pools, Slots(None, None, s.source, pad=s.pad), s.chunk_size, s.scale, s.eps, s.o)


def _serve_fake(*arguments: Any) -> None:
    """Fake implementation: the operator returns nothing."""


serve_ttt_op = register(
    "serve_ttt(Tensor q, Tensor k, Tensor v, Tensor eta, Tensor? eta_col, Tensor w, Tensor b, Tensor(a!) state, "
    "Tensor(b!) bias, Tensor(c!) grad, Tensor(d!) bias_grad, Tensor(e!) position, Tensor? source, Tensor(f!) o, "
    "int pad, str residual, float scale, float eps, int chunk_size, str backend) -> ()",
    _serve,
    _serve_fake,
)
