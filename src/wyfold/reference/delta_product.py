"""(Gated) DeltaProduct, token by token: several updates of the delta rule for each token."""

import torch
from torch import Tensor

from wyfold.reference.delta import Result, recurrence


def gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    num_householder: int = 1,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
) -> Result:
    """Gated DeltaProduct: a token decays the state once, and updates it with n keys in turn before it is read.

    Args:
        q: [B, T, H, K], any float.
        k: [B, T n, H, K]. Keys of token t are rows t n to t n + n - 1.
        v: [B, T n, HV, V].
        g: [B, T, HV] or [B, T, HV, K], or None. Natural log of the decay per token, before the first update.
        beta: [B, T n, HV] or None.
        num_householder: n.

    Other arguments and results as in `kda`. Boundaries and intermediate states count tokens, not updates.

    Source:
        DeltaProduct, arXiv:2502.10297, section 3.
    """
    return recurrence(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel, beta_logits=use_beta_sigmoid_in_kernel, neg_eigval=allow_neg_eigval,
        v_first=state_v_first, state_dtype=state_dtype, cu_seqlens=cu_seqlens,
        intermediate=return_intermediate_states, every=checkpoint_every, updates=num_householder,
    )  # fmt: skip
