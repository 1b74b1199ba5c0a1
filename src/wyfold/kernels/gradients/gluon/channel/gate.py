"""Log gates of a chunk, and their sums inside sub-chunks."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.gradients.gluon.channel.arguments import GateActivation
from wyfold.kernels.gradients.gluon.channel.tiles import (
    allocate4,
    concat_tuples,
    empty_tuple,
    load_quarter,
    row_block,
    split2_columns,
)
from wyfold.kernels.gradients.gluon.tokens import exp2
from wyfold.tile.activation.triton import LOG2_E, exp
from wyfold.tile.decay.gluon import activated


@gluon.jit
def gate_activation(gate, h):
    """Parameters of the gate's activation of value head h."""
    rate = 1.0
    if gate.A_log is not None:
        rate = exp(gl.load(gate.A_log + h).to(gl.float32))
    return GateActivation(rate, gate.lower_bound, gate.clamp)


@gluon.jit
def store_decays(
    t_g, p_dt_bias, parameters, activation, rows, ROLLED: gl.constexpr, ACTIVATION: gl.constexpr, SIZES: gl.constexpr
):
    """Decays of a chunk, in the shared memory of the states.

    Returns:
        I, Q: Four tiles [BK, 16] each, in shared memory.
        E: [BK] decay of each of the 8 sub-chunks.
        logs: [BT, BK] log gates to base 2; t_g where no activation is applied.
    """
    BT: gl.constexpr = SIZES.BT
    BK: gl.constexpr = SIZES.K // 2
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 16, 16])
    CH: gl.constexpr = gl.SliceLayout(1, L)
    DECAYS: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
    I, Q = allocate4(gl.float32, BK, DECAYS), allocate4(gl.float32, BK, DECAYS)
    logs = t_g
    if ACTIVATION != "given":
        logs = gl.allocate_shared_memory(gl.float32, [BT, BK], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
        store_log_gates(logs, t_g, p_dt_bias, parameters, activation, rows, ROLLED, ACTIVATION, BT, BK)
    E = empty_tuple()
    for n in gl.static_range(4):
        log_g = load_quarter(logs, n, L)
        if ACTIVATION == "given":
            log_g = log2_gate(log_g, 0.0, activation, True, ACTIVATION)
        E = concat_tuples(E, split2_columns(exp2(gl.sum(log_g.reshape([BK, 2, 8]), axis=2)), CH))
        since_start, until_end = sums_inside_sub_chunks(log_g)
        I[n].store(exp2(since_start))
        Q[n].store(exp2(until_end))
    return I, Q, E, logs


@gluon.jit
def store_log_gates(
    logs,
    t_g,
    p_dt_bias,
    parameters,
    activation,
    rows,
    ROLLED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BT: gl.constexpr,
    BK: gl.constexpr,
):
    """Apply the gate's activation to a chunk, 16 tokens at a time, and store the log gates to base 2."""
    G: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, 16, layout=gl.SliceLayout(1, G))
    bias = 0.0
    if p_dt_bias is not None:
        bias = gl.load(p_dt_bias + parameters + gl.arange(0, BK, layout=gl.SliceLayout(0, G))).to(gl.float32)[None, :]
    if ROLLED:
        for n in range(BT // 16):
            raw = row_block(t_g, n, 16).load(G).to(gl.float32)
            row_block(logs, n, 16).store(log2_gate(raw, bias, activation, (16 * n + o_t < rows)[:, None], ACTIVATION))
    else:
        for n in gl.static_range(BT // 16):
            raw = t_g.slice(16 * n, 16).load(G).to(gl.float32)
            logs.slice(16 * n, 16).store(log2_gate(raw, bias, activation, (16 * n + o_t < rows)[:, None], ACTIVATION))


@gluon.jit
def log2_gate(x, bias, activation, is_token, ACTIVATION: gl.constexpr):
    """Log gate to base 2; zero in rows without a token, where x is zero."""
    g = activated(x, activation.rate, bias, activation.lower_bound, activation.clamp, ACTIVATION)
    if ACTIVATION != "given":
        g = gl.where(is_token, g, 0.0)
    return gl.fma(g, LOG2_E, 0.0)  # rounded here, so that no later addition is fused with the product


@gluon.jit
def sums_inside_sub_chunks(x):
    """Inclusive prefix sums inside each sub-chunk, and exclusive suffix sums. x has a product result's layout.

    A thread holds two adjacent tokens of a sub-chunk, and four adjacent threads hold its 8 tokens.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .f32 s, a, b;"
        " add.f32 s, $4, $5; mov.f32 b, s;"
        " shfl.sync.up.b32 a|p, b, 1, 0x1c00, 0xffffffff; @p add.f32 b, b, a;"
        " shfl.sync.up.b32 a|p, b, 2, 0x1c00, 0xffffffff; @p add.f32 b, b, a;"
        " shfl.sync.up.b32 a|p, b, 1, 0x1c00, 0xffffffff; @!p mov.f32 a, 0f00000000;"
        " add.f32 $0, a, $4; add.f32 $1, $0, $5; mov.f32 b, s;"
        " shfl.sync.down.b32 a|p, b, 1, 0x1c03, 0xffffffff; @p add.f32 b, b, a;"
        " shfl.sync.down.b32 a|p, b, 2, 0x1c03, 0xffffffff; @p add.f32 b, b, a;"
        " shfl.sync.down.b32 a|p, b, 1, 0x1c03, 0xffffffff; @!p mov.f32 a, 0f00000000;"
        " mov.f32 $3, a; add.f32 $2, a, $5; }",
        "=&f,=&f,=&f,=&f,f,f", [x], dtype=(gl.float32, gl.float32), is_pure=True, pack=2,
    )  # fmt: skip
