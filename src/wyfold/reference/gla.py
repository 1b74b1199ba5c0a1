"""Gated linear attention, token by token; with a scalar gate or none, simple GLA and linear attention."""

import torch
from torch import Tensor

from wyfold.reference.delta import Result, recurrence


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gv: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
) -> Result:
    """Gated linear attention: a write is added to the decayed state, and erases nothing.

    Args:
        q, k: [B, T, H, K], any float and any length of rows.
        v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV, K] (GLA), [B, T, HV] (simple GLA), or None (linear attention). Natural log of the decay per token.
        gv: [B, T, HV, V] or None. Natural log of the decay per token and value channel.

    Other arguments and results as in `kda`.

    Source:
        GLA, arXiv:2312.06635, section 4.
    """
    return recurrence(
        q, k, v, g, None, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        qk_l2norm=False, beta_logits=False, neg_eigval=False, v_first=state_v_first, state_dtype=state_dtype,
        cu_seqlens=cu_seqlens, intermediate=return_intermediate_states, every=checkpoint_every, erases=False, gv=gv,
    )  # fmt: skip
