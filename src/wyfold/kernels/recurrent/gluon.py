"""`recurrent` in Gluon for Hopper: one decoded token, and states of K = V = 128 stored K-first in bfloat16.

The arithmetic is that of the Triton kernel, bit by bit. The difference is where the state is held. The Triton kernel
holds a tile of 32 value rows in registers: it reads rows of the pool in pieces of 64 bytes, and eight programs fill a
multiprocessor. Here BV columns of a head are copied asynchronously to shared memory, as whole rows where BV is V. They
are read there twice: for the sums over K, and for the store.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from wyfold.kernels.records import Slots
from wyfold.kernels.recurrent.triton import launch_key
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.activation.triton import exp, sigmoid
from wyfold.tile.decay.triton import FLOOR, activated, gate_flags, load_gate_parameters
from wyfold.tile.index.triton import load_token_number, strides
from wyfold.tile.norm.triton import normalised, vector_sum
from wyfold.tile.state.gluon import column_layout, copy_state_async, key_sums, store_written


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    slots: Slots,
    grid: ChunkGrid,
    options: DeltaOptions,
    o: Tensor,
) -> None:
    """Advance every sequence by one token; takes the arguments of the Triton launch.

    Args:
        q, k: [B, 1, H, K], any strides.
        v: [B, 1, HV, V].
        g: [B, 1, HV] or [B, 1, HV, K] gate of the call; None without a gate.
        beta: [B, 1, HV] write strength of the call; None for 1.
        A_log, dt_bias: Gate parameters, contiguous, or None.
        slots: bfloat16 pools to read and to write, with one slot of each per sequence. States begin at multiples of 16
            bytes, and strides of slots and heads are multiples of 16 elements (`served_key`).
        grid: The call's boundaries; its chunks are not used.
        options: Uses the same fields as the Triton launch.
        o: [B, 1, HV, V] written, zero where a sequence has no live slot.
    """
    entering, leaving = cast(Tensor, slots.entering), cast(Tensor, slots.leaving)
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    key = launch_key(entering.dtype, K, V, g, v_first=options.state_v_first, alone=True)
    config = tuned("recurrent.gluon", key, q.device)
    BV = config.blocks["BV"]
    launch_kernel(
        wyfold_recurrent_gluon,
        grid.sequences * HV * (V // BV),
        q,
        q.stride(),
        k,
        k.stride(),
        v,
        v.stride(),
        g,
        strides(g),
        beta,
        strides(beta),
        A_log,
        dt_bias,
        entering,
        entering.stride()[:2],
        leaving,
        leaving.stride()[:2],
        slots.source,
        strides(slots.source),
        slots.target,
        strides(slots.target),
        slots.given,
        o,
        o.stride(),
        entering.shape[0],
        leaving.shape[0],
        slots.pad,
        options.scale,
        options.lower_bound,
        options.clamp or FLOOR,
        options.beta_most,
        H=H,
        HV=HV,
        K=K,
        V=V,
        BV=BV,
        ACTIVATION=options.activation,
        NORM=options.qk_l2norm,
        LOGIT=options.beta_logit,
        **gate_flags(g),
        **config.options(contract=False),
    )


NUMBERS = "slots slots_left pad scale lower_bound clamp beta_most".split()


@gluon.jit(do_not_specialize=NUMBERS)
def wyfold_recurrent_gluon(
    p_q,
    s_q,
    p_k,
    s_k,
    p_v,
    s_v,
    p_g,
    s_g,
    p_beta,
    s_beta,
    p_A_log,
    p_dt_bias,
    p_S0,
    s_S0,
    p_ST,
    s_ST,
    p_source,
    s_source,
    p_target,
    s_target,
    p_given,
    p_o,
    s_o,
    slots,
    slots_left,
    pad,
    scale,
    lower_bound,
    clamp,
    beta_most,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    ACTIVATION: gl.constexpr,
    NORM: gl.constexpr,
    LOGIT: gl.constexpr,
    GATE: gl.constexpr,
    SCALAR: gl.constexpr,
    CHANNEL: gl.constexpr,
):
    """One program updates BV columns of a head's state."""
    NV: gl.constexpr = V // BV
    pid = gl.program_id(0).to(gl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    i_h = i_hv // (HV // H)
    slot = i_n
    if p_source is not None:
        slot = gl.load(p_source + i_n * s_source[0]).to(gl.int64)
    o_v = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, column_layout(BV, gl.num_warps())))
    at_o = p_o + (i_n * s_o[0] + i_hv * s_o[2]) + o_v * s_o[3]
    if (slot <= pad) | (slot >= slots):
        gl.store(at_o, (o_v * 0).to(p_o.dtype.element_ty))
        return

    has_state = slot > pad
    if p_given is not None:
        has_state = gl.load(p_given + i_n) != 0
    state_tile = copy_state_async(p_S0 + (slot * s_S0[0] + i_hv * s_S0[1] + i_v * BV), has_state, K, V, BV)

    # Every warp holds all of q, k and the gate, so their sums need no exchange between warps.
    LINE: gl.constexpr = gl.BlockedLayout([K // 32], [32], [gl.num_warps()], [0])
    o_k = gl.arange(0, K, layout=LINE)
    b_k = gl.load(p_k + (i_n * s_k[0] + i_h * s_k[2]) + o_k.to(gl.int64) * s_k[3]).to(gl.float32)
    b_q = gl.load(p_q + (i_n * s_q[0] + i_h * s_q[2]) + o_k.to(gl.int64) * s_q[3]).to(gl.float32)
    b_v = gl.load(p_v + (i_n * s_v[0] + i_hv * s_v[2]) + o_v * s_v[3]).to(gl.float32)
    decay, beta = 1.0, 1.0
    if p_beta is not None:
        beta = load_token_number(p_beta, s_beta, i_n, 0, i_hv, True)
    if p_g is not None:
        rate, bias = 1.0, 0.0
        if CHANNEL:
            x = gl.load(p_g + (i_n * s_g[0] + i_hv * s_g[2]) + o_k.to(gl.int64) * s_g[3]).to(gl.float32)
            if ACTIVATION != "given":
                rate, _ = load_gate_parameters(p_A_log, None, i_hv, 0, GATE, K, K)
                if p_dt_bias is not None:
                    bias = gl.load(p_dt_bias + i_hv * K + o_k).to(gl.float32)
        else:
            x = load_token_number(p_g, s_g, i_n, 0, i_hv, True)
            if ACTIVATION != "given":
                rate, bias = load_gate_parameters(p_A_log, p_dt_bias, i_hv, 0, GATE, K, K)
        decay = exp(activated(x, rate, bias, lower_bound, clamp, ACTIVATION))
    if NORM:
        b_k, b_q = normalised(b_k), normalised(b_q)
    if LOGIT:
        beta = sigmoid(beta) * beta_most
    qk = vector_sum(b_q * b_k)
    q, k = _to_shared_memory(b_q), _to_shared_memory(b_k)
    if CHANNEL:
        decay = _to_shared_memory(decay)
    async_copy.wait_group(0)

    b_Sq, b_Sk = key_sums(state_tile, q, k, decay, CHANNEL)
    b_y = (b_v - b_Sk) * beta
    gl.store(at_o, (gl.fma(b_y, qk, b_Sq) * scale).to(p_o.dtype.element_ty))
    to = slot
    if p_target is not None:
        to = gl.load(p_target + i_n * s_target[0]).to(gl.int64)
    is_live = (to > pad) & (to < slots_left)
    store_written(p_ST + (to * s_ST[0] + i_hv * s_ST[1] + i_v * BV), state_tile, k, b_y, decay, is_live, CHANNEL, V)


@gluon.jit
def _to_shared_memory(b_x):
    """Copy a vector to shared memory, where every thread can read all of it."""
    return gl.allocate_shared_memory(b_x.dtype, b_x.shape, gl.SwizzledSharedLayout(1, 1, 1, [0]), b_x)
