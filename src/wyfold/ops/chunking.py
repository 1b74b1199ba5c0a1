"""Chunk size and segmentation of a delta-family call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wyfold.kernels import table
from wyfold.ops.delta_arguments import DeltaCall
from wyfold.ops.delta_checks import CheckedDelta
from wyfold.runtime import check, kernel_configs, segment_rule, triton_support
from wyfold.runtime.chunk_layout import CHUNK_SIZES, Cut, max_borders
from wyfold.runtime.layout import SequenceLayout, boundaries
from wyfold.runtime.torch_ops import constant_to_compilers


def known_short(op: str, q: object, cu_seqlens: object, on_cpu: object) -> bool:
    """Whether the host knows that no sequence of a long buffer is long enough for segments."""
    if cu_seqlens is None or not isinstance(q, Tensor) or q.ndim < 2 or segment_rule.forcing() is not None:
        return False
    if torch.compiler.is_compiling() or q.shape[1] < segment_rule.SHORTEST:
        return False
    longest = cu_seqlens.longest if isinstance(cu_seqlens, SequenceLayout) else None
    if longest is None and isinstance(on_cpu, Tensor) and check.readable(on_cpu):
        longest = max(boundaries(op, on_cpu, "cu_seqlens_cpu").diff().tolist(), default=0)
    # For every chunk size, the longest sequence then has fewer chunks than the shortest segmented one.
    return longest is not None and longest <= segment_rule.SHORTEST - max(CHUNK_SIZES)


def chunk_size_of(call: DeltaCall, checked: CheckedDelta) -> int:
    """Chunk size. For the recurrent form, whose bits do not depend on it, the spacing of saved states."""
    op, chunk, every = call.op, call.chunk, checked.every
    if chunk is None:
        return math.gcd(every, 64)
    check.flag(op, disable_recompute=chunk.disable_recompute)
    if chunk.chunk_size is not None:
        check.choice(op, "chunk_size", chunk.chunk_size, CHUNK_SIZES)
    size = chunk.chunk_size or best_chunk_size(checked.q, checked.v, channel_gate=call.gate.channel)
    if every % size:
        raise ValueError(f"{op}: checkpoint_every must be a multiple of chunk_size = {size}, got {every}")
    return size


def best_chunk_size(q: Tensor, v: Tensor, *, channel_gate: bool) -> int:
    """Fastest chunk size for the device, gate kind and widths.

    See docs/facts/cpu.md, CPU-3, and docs/facts/hopper.md, H200-5.
    """
    if q.device.type == "cpu":
        return 32 if q.shape[-1] * v.shape[-1] >= 128 * 128 else 16
    if not channel_gate:
        return 64
    # Formatting the widths specialises them: to compilers they may be symbolic.
    widths = f"K{q.shape[-1]} V{v.shape[-1]} C64 channel GR{v.shape[2] // q.shape[2]}"
    return 64 if _has_channel_gradient_kernel(q.device, q.dtype, widths) else 32


@constant_to_compilers
def _has_channel_gradient_kernel(device: torch.device, dtype: torch.dtype, widths: str) -> bool:
    """Whether the Gluon gradient kernel for chunks of 64 with a channel gate is available."""
    if device.type != "cuda" or triton_support.support_of(device).refusal or dtype not in table.FLOATS:
        return False
    return kernel_configs.has_row(
        triton_support.architecture(device), "gradients.gluon", f"{kernel_configs.dtype_word(dtype)} {widths}"
    )


def cut_of(call: DeltaCall, checked: CheckedDelta, chunk_size: int) -> Cut:
    """Segmentation of a call's long sequences; `WHOLE` if no sequence can be long enough.

    `WHOLE` also on eager, which gains nothing, for rules without kernels, and with intermediate states, which are those
    of one scan.
    """
    chunk, flags, q = call.chunk, call.flags, checked.q
    if chunk is None or call.columns is not None:
        return segment_rule.WHOLE
    if chunk.max_splits is not None:
        check.integer(call.op, "max_splits", chunk.max_splits, least=1)
    if flags.batch_invariant or checked.every or (runs_eagerly(call) and segment_rule.forcing() is None):
        return segment_rule.WHOLE
    B, T, HV, V = checked.v.shape
    # Round T up to whole chunks: the rule counts chunks and must not depend on tokens within the last one.
    if -(-T // chunk_size) * chunk_size < segment_rule.SHORTEST and segment_rule.forcing() is None:
        return segment_rule.WHOLE
    cut = segment_rule.cut(HV, q.shape[-1], V, chunk_size, _processors(q.device), chunk.max_splits)
    return cut if cut.chunks and max_borders(B, T, chunk_size, checked.packed, cut) else segment_rule.WHOLE


def runs_eagerly(call: DeltaCall) -> bool:
    """Whether the call demands the eager backend, or gets it because of its device."""
    return call.flags.backend == "eager" or (call.flags.backend is None and call.q.device.type != "cuda")


@constant_to_compilers
def _processors(device: torch.device) -> int:
    return kernel_configs.processors(device)
