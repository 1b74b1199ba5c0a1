"""Gated DeltaProduct layer: several updates of the delta rule for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from wyfold.layers.delta_net import DeltaMixer
from wyfold.layers.gated_delta_net import DecayParameters
from wyfold.layers.norm import GatedRMSNorm
from wyfold.ops.delta_product import (
    chunk_gated_delta_product,
    fused_recurrent_gated_delta_product,
    spread_updates,
)
from wyfold.ops.gates import fused_gdn_gate
from wyfold.ops.serving_delta import prefill
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout


class GatedDeltaProduct(DeltaMixer):
    """Gated DeltaProduct layer: each token decays its head's state once, then updates it with n keys in turn.

        q, k_j, v_j = silu(conv(W_qkv x)),   beta_j = 2 sigmoid(W_beta x),   j = 1 ... n
        g = -exp(A_log) softplus(W_decay x + dt_bias)
        y = W_o (rms_norm(gated_delta_product(q/|q|, k/|k|, v, g, beta)) * silu(W_gate x))

    `forward` is that of the other delta-rule layers.

    Args:
        hidden_size: Width of x.
        num_heads: H, query and key heads.
        num_v_heads: HV, value heads, a multiple of H. None: H.
        head_dim: K, width of a query and key, 1 to 256.
        head_v_dim: V, width of a value, 1 to 512. None: K.
        conv_size: Length of the short convolution, 2 to 8.
        num_householder: n, the updates of a token.
        forget_gate: Whether the state decays. False: DeltaProduct.
        allow_neg_eigval: beta in [0, 2] instead of [0, 1].
        norm_eps: eps of the output norm.
        backend: Backend of every operator in the layer. None: the best available one, which on CUDA is never "eager".

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A size is not supported by the operator.

    Source:
        DeltaProduct, arXiv:2502.10297, section 3.

    Examples:
        >>> import torch
        >>> from wyfold.layers import GatedDeltaProduct
        >>> layer = GatedDeltaProduct(hidden_size=32, num_heads=2, head_dim=16, num_householder=2)
        >>> layer(torch.randn(1, 5, 32)).shape
        torch.Size([1, 5, 32])
    """

    operators = (chunk_gated_delta_product, fused_recurrent_gated_delta_product)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None = None,
        head_dim: int = 128,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        *,
        num_householder: int = 2,
        forget_gate: bool = True,
        allow_neg_eigval: bool = True,
        norm_eps: float = 1e-6,
        backend: str | None = None,
    ):
        name = "GatedDeltaProduct"
        check.integer(name, "num_householder", num_householder, least=1)
        check.flag(name, forget_gate=forget_gate)
        sizes = (hidden_size, num_heads, num_v_heads, head_dim, head_v_dim, conv_size)
        super().__init__(*sizes, allow_neg_eigval, backend, num_householder)
        self.forget = nn.Linear(hidden_size, self.num_v_heads, bias=False) if forget_gate else None
        self.decay_parameters = DecayParameters(self.num_v_heads) if forget_gate else None
        self.gate = nn.Linear(hidden_size, self.num_v_heads * self.head_v_dim, bias=False)
        eps = check.epsilon(name, norm_eps, name="norm_eps")
        self.norm = GatedRMSNorm(self.head_v_dim, eps=eps, backend=backend)

    def gate_arguments(self, x: Tensor) -> dict[str, Any]:
        updates = {"num_householder": self.updates}
        if self.forget is None or self.decay_parameters is None:
            return updates
        return {"g": fused_gdn_gate(self.forget(x), *self.decay_parameters(), backend=self.backend), **updates}

    def _serve(
        self,
        rule: Callable[..., Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        g: Tensor | None = None,
        num_householder: int = 1,
        cu_seqlens: SequenceLayout | None = None,
        **arguments: Any,
    ) -> Tensor:
        """Call `prefill` on the updates, one row each; a token is as many rows as it has updates."""
        n = num_householder
        o = prefill(
            spread_updates(q, n, last=True),
            k,
            v,
            g=None if g is None else spread_updates(g, n, last=False),
            cu_seqlens=None if cu_seqlens is None else n * cu_seqlens.cu_seqlens,
            **arguments,
        )
        return o[:, n - 1 :: n]

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        return self.norm(o, self.gate(x).view_as(o))
