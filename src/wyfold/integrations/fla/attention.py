"""PaTH attention under fla's name, with fla's argument order and keywords.

The operator that the function calls documents formula, arguments, results and errors; the docstring here lists
differences.
"""

from __future__ import annotations

from torch import Tensor

from wyfold.ops import path_attention


def parallel_path_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    use_cache: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`wyfold.parallel_path_attn`; unlike fla's, it accepts any float for w, beta and g, and any width up to 128."""
    return path_attention.parallel_path_attn(
        q, k, v, w, beta, g, scale=scale, cu_seqlens=cu_seqlens, use_cache=use_cache
    )


parallel_path_attention = parallel_path_attn
