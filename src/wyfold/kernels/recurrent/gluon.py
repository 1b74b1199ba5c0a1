"""`recurrent` in Gluon for Hopper: one decoded token, and states of K = V = 128 stored K-first in bfloat16.

The arithmetic is that of the Triton kernel, bit by bit. The difference is where the state is held. The Triton kernel
holds a tile of 32 value rows in registers: it reads rows of the pool in pieces of 64 bytes, and eight programs fill a
multiprocessor. Here BV columns of a head are copied asynchronously to shared memory, as whole rows where BV is V. They
are read there twice: for the sums over K, and for the store.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from wyfold.kernels.records import Slots
from wyfold.kernels.recurrent.triton import launch_key
from wyfold.kernels.recurrent.triton.forward import Pool, States
from wyfold.kernels.recurrent.triton.tokens import Inputs
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.activation.triton import exp, sigmoid
from wyfold.tile.decay.triton import activated, gate_argument, gate_flags, load_gate_parameters
from wyfold.tile.index.triton import load_token_number, with_strides
from wyfold.tile.index.triton.strength import Strength
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
        inputs=with_strides(Inputs, q=q, k=k, v=v, o=o),
        gate=gate_argument(g, A_log, dt_bias, options),
        strength=with_strides(Strength, beta=beta, most=options.beta_most),
        states=States(S0=entering, s_S0=entering.stride()[:2], ST=leaving, s_ST=leaving.stride()[:2]),
        pool=with_strides(Pool, source=slots.source, target=slots.target, given=slots.given),
        slots=entering.shape[0],
        slots_left=leaving.shape[0],
        pad=slots.pad,
        scale=options.scale,
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BV=BV),
        ACTIVATION=options.activation,
        NORM=options.qk_l2norm,
        LOGIT=options.beta_logit,
        **gate_flags(g),
        **config.options(contract=False),
    )


NUMBERS = "slots slots_left pad scale lower_bound clamp beta_most".split()


class Sizes(NamedTuple):
    """Constexprs: sizes of the call, and columns of a program."""

    H: int
    HV: int
    K: int
    V: int
    BV: int


@gluon.jit(do_not_specialize=["slots", "slots_left", "pad", "scale"])
def wyfold_recurrent_gluon(
    inputs,
    gate,
    strength,
    states,
    pool,
    slots,
    slots_left,
    pad,
    scale,
    SIZES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    NORM: gl.constexpr,
    LOGIT: gl.constexpr,
    GATE: gl.constexpr,
    SCALAR: gl.constexpr,
    CHANNEL: gl.constexpr,
):
    """One program updates BV columns of a head's state."""
    H: gl.constexpr = SIZES.H
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    V: gl.constexpr = SIZES.V
    BV: gl.constexpr = SIZES.BV
    NV: gl.constexpr = V // BV
    pid = gl.program_id(0).to(gl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    i_h = i_hv // (HV // H)
    slot = i_n
    if pool.source is not None:
        slot = gl.load(pool.source + i_n * pool.s_source[0]).to(gl.int64)
    o_v = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, column_layout(BV, gl.num_warps())))
    at_o = inputs.o + (i_n * inputs.s_o[0] + i_hv * inputs.s_o[2]) + o_v * inputs.s_o[3]
    if (slot <= pad) | (slot >= slots):
        gl.store(at_o, (o_v * 0).to(inputs.o.dtype.element_ty))
        return

    has_state = slot > pad
    if pool.given is not None:
        has_state = gl.load(pool.given + i_n) != 0
    state_tile = copy_state_async(
        states.S0 + (slot * states.s_S0[0] + i_hv * states.s_S0[1] + i_v * BV), has_state, K, V, BV
    )

    # Every warp holds all of q, k and the gate, so their sums need no exchange between warps.
    LINE: gl.constexpr = gl.BlockedLayout([K // 32], [32], [gl.num_warps()], [0])
    o_k = gl.arange(0, K, layout=LINE)
    b_k = gl.load(inputs.k + (i_n * inputs.s_k[0] + i_h * inputs.s_k[2]) + o_k.to(gl.int64) * inputs.s_k[3]).to(
        gl.float32
    )
    b_q = gl.load(inputs.q + (i_n * inputs.s_q[0] + i_h * inputs.s_q[2]) + o_k.to(gl.int64) * inputs.s_q[3]).to(
        gl.float32
    )
    b_v = gl.load(inputs.v + (i_n * inputs.s_v[0] + i_hv * inputs.s_v[2]) + o_v * inputs.s_v[3]).to(gl.float32)
    decay, beta = 1.0, 1.0
    if strength.beta is not None:
        beta = load_token_number(strength.beta, strength.s_beta, i_n, 0, i_hv, True)
    if gate.g is not None:
        rate, bias = 1.0, 0.0
        if CHANNEL:
            x = gl.load(gate.g + (i_n * gate.s_g[0] + i_hv * gate.s_g[2]) + o_k.to(gl.int64) * gate.s_g[3]).to(
                gl.float32
            )
            if ACTIVATION != "given":
                rate, _ = load_gate_parameters(gate.A_log, None, i_hv, 0, GATE, K, K)
                if gate.dt_bias is not None:
                    bias = gl.load(gate.dt_bias + i_hv * K + o_k).to(gl.float32)
        else:
            x = load_token_number(gate.g, gate.s_g, i_n, 0, i_hv, True)
            if ACTIVATION != "given":
                rate, bias = load_gate_parameters(gate.A_log, gate.dt_bias, i_hv, 0, GATE, K, K)
        decay = exp(activated(x, rate, bias, gate.lower_bound, gate.clamp, ACTIVATION))
    if NORM:
        b_k, b_q = normalised(b_k), normalised(b_q)
    if LOGIT:
        beta = sigmoid(beta) * strength.most
    qk = vector_sum(b_q * b_k)
    q, k = _to_shared_memory(b_q), _to_shared_memory(b_k)
    if CHANNEL:
        decay = _to_shared_memory(decay)
    async_copy.wait_group(0)

    b_Sq, b_Sk = key_sums(state_tile, q, k, decay, CHANNEL)
    b_y = (b_v - b_Sk) * beta
    gl.store(at_o, (gl.fma(b_y, qk, b_Sq) * scale).to(inputs.o.dtype.element_ty))
    to = slot
    if pool.target is not None:
        to = gl.load(pool.target + i_n * pool.s_target[0]).to(gl.int64)
    is_live = (to > pad) & (to < slots_left)
    store_written(
        states.ST + (to * states.s_ST[0] + i_hv * states.s_ST[1] + i_v * BV),
        state_tile,
        k,
        b_y,
        decay,
        is_live,
        CHANNEL,
        V,
    )


@gluon.jit
def _to_shared_memory(b_x):
    """Copy a vector to shared memory, where every thread can read all of it."""
    return gl.allocate_shared_memory(b_x.dtype, b_x.shape, gl.SwizzledSharedLayout(1, 1, 1, [0]), b_x)
