"""Launch keys of the kernels of a delta-family call, by which the tables of configurations are searched."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from wyfold.autograd.low_rank_chunk import BACKWARD_CHUNK
from wyfold.kernels import table
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.options import DeltaOptions

Stages = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of the launches of a forward and of its backward."""


def launch_keys(
    stages: Stages,
    q: Tensor,
    v: Tensor,
    g: Tensor | None,
    chunk_size: int,
    scanned: int,
    *,
    kept: bool,
    norm: bool,
    erases: bool,
) -> list[tuple[str, LaunchKey]]:
    """(stage, launch key) of each kernel of a chunked call.

    Args:
        stages: Stages of the forward and of the backward.
        scanned: Number of sequences, or the likely number of segments.
        kept: Intermediate states are returned.
        norm: Kernels normalise the rows of q and k.
        erases: As of `DeltaOptions`.
    """
    prepare: Any = table.kernel_module("prepare", "triton")
    gate, folded = prepare.gate_kind(g), prepare.reads_folded(g)
    key = prepare.launch_key(q.dtype, q.shape[-1], v.shape[-1], chunk_size, gate, folded, erases=erases)
    keys = dict.fromkeys(stages[0] + stages[1], key)
    keys["prepare"] = key._replace(norm=norm)
    keys["scan"] = table.kernel_module("scan", "triton").scan_key(key, scanned, v, kept=kept)
    if "scan_bwd" in keys:
        keys["scan_bwd"] = table.kernel_module("scan_bwd", "triton").scan_bwd_key(key, scanned, v)
    if "gradients" in keys:
        keys["gradients"] = table.kernel_module("gradients", "triton").gradients_key(keys["prepare"], q, v)
    back = []
    if "segment_summary" in keys:
        keys["segment_summary"] = key._replace(launch="fwd")
        back = [("segment_summary", key._replace(launch="bwd"))] if stages[1] else []
    return [*keys.items(), *back]


def low_rank_keys(
    options: DeltaOptions,
    stages: Stages,
    q: Tensor,
    v: Tensor,
    g: Tensor | None,
    stored: torch.dtype = torch.float32,
    *,
    w: Tensor | None = None,
    in_parts: bool = False,
    wide: bool = False,
    shorter: bool = False,
) -> list[tuple[str, LaunchKey]]:
    """(stage, launch key) of each kernel of a diagonal-plus-low-rank rule.

    Args:
        stored: dtype of the states.
        w: Factors of v, or None.
        in_parts: Sequences are cut, or intermediate states are returned.
        wide: The output has another dtype than v.
        shorter: The backward has chunks of `BACKWARD_CHUNK` (`low_rank_chunk.backward_options`).
    """
    prepare: Any = table.kernel_module("low_rank_prepare", "triton")
    recurrent: Any = table.kernel_module("low_rank_recurrent", "triton")
    scan: Any = table.kernel_module("low_rank_scan", "triton")
    K, V = q.shape[-1], v.shape[-1]
    chunk_size = BACKWARD_CHUNK if options.recurrent else options.chunk_size

    def keys(names: Iterable[str], chunk_size: int) -> list[tuple[str, LaunchKey]]:
        key, how = prepare.launch_key(q.dtype, K, V, chunk_size), options._replace(chunk_size=chunk_size)
        prepared = prepare.prepare_key(key, q, g, how)
        own = {
            "recurrent": recurrent.launch_key(stored, K, V),
            "prepare": prepared,
            "scan": scan.scan_key(prepared, v, w, kept=in_parts, wide=wide),
            "gradients": key._replace(gate=prepare.token_gate_kind(q, g, how)),
        }
        return [(options.stage(name), own.get(name, key)) for name in names]

    forward, backward = stages
    if shorter:
        return keys(forward, chunk_size) + keys(backward, BACKWARD_CHUNK)
    return keys(dict.fromkeys(forward[options.recurrent :] + backward), chunk_size)


def token_keys(
    q: Tensor, v: Tensor, g: Tensor | None, stored: torch.dtype, *, v_first: bool
) -> list[tuple[str, LaunchKey]]:
    """(stage, launch key) of a recurrent call's kernels: forward, backward, and the sum of partial gradients."""
    module: Any = table.kernel_module("recurrent", "triton")
    K, V = q.shape[-1], v.shape[-1]
    backward = [("recurrent", module.launch_key_bwd(K, V)), ("recurrent", LaunchKey(launch="gather"))]
    return [("recurrent", module.launch_key(stored, K, V, g, v_first=v_first)), *backward]
