"""Calls for `memory.py` on a GPU: small calls of every public operator by name, and the planted faults.

`tests/compile/aot.py` has a call for every shipped configuration. Those calls are made here, with lengths that end
inside a chunk and, if packed, with empty and short sequences. `BESIDE` adds widths that fill no tile, the other dtypes,
norms and gates inside, kept factors, and the serving operators.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from tests.compile import aot
from tests.compile.aot import Call
from torch import Tensor

import wyfold
from wyfold import TTTState, serving
from wyfold.cli.operators import OPERATOR_SPECS
from wyfold.context_parallel.partition import owned_ranges, partition_sequences
from wyfold.context_parallel.routes import backward_routes, forward_routes
from wyfold.kernels import table
from wyfold.kernels.records import StateRows
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import segment_rule

RULES = {"delta_rule": "chunk_delta_rule", "gdn": "chunk_gated_delta_rule", "kda": "chunk_kda"}
DTYPES = ("bfloat16", "float16", "float32")
NORM = ("use_qk_l2norm_in_kernel", True)
GLUON = (("chunk_size", 64),)
"""Options of the Gluon kernels, with bfloat16 and K = V = 128."""

TOKENS = 130
LONG = 386
"""Tokens of a sequence that passes every stage of a scan's loop twice, and ends inside a chunk."""

BESIDE = (
    *(
        Call(
            subject + (", gate inside" if rule != "delta_rule" else ""),
            dtype,
            24,
            40,
            options=(NORM, ("chunk_size", chunk)),
            packed=True,
            heads=3,
        )
        for (rule, subject), chunk in zip(RULES.items(), (16, 32, 64))
        for dtype in DTYPES
    ),
    *(Call(RULES[rule], "float16", options=(NORM,)) for rule in ("delta_rule", "kda")),
    Call("chunk_delta_rule", "float32", 64, 64, options=(NORM,)),
    *(
        Call("chunk_iplr_delta_rule", "float32", width, width, options=(("chunk_size", 32),), packed=True)
        for width in (16, 32)  # read outside of memory once (docs/facts/hopper.md, H200-4)
    ),
    *(Call(subject, options=(*GLUON, NORM, ("disable_recompute", True))) for subject in RULES.values()),
    Call("chunk_gated_delta_rule, gate inside", options=(*GLUON, NORM), packed=True),
    Call("chunk_delta_rule", options=(*GLUON, NORM), packed=True, segments=5),
    Call("chunk_kda", options=GLUON, segments=5),
    Call("chunk_gated_delta_rule", "float16", 64, 64, segments=5),
    Call("chunk_delta_rule", K=256, V=136, wrt=("initial_state",)),
    Call("chunk_kda, bounded gate", K=72, V=56, options=(("safe_gate", True),)),
    *(
        Call(f"fused_recurrent_{rule}", dtype, 40, 24, options=(NORM,), packed=packed, heads=3)
        for rule, dtype, packed in (
            ("delta_rule", "float32", True),
            ("gated_delta_rule", "bfloat16", True),
            ("kda", "float16", False),
        )
    ),
    Call(
        "chunk_ttt_linear", K=64, V=64, options=(("chunk_size", 16), ("eta_col", 0.5), ("residual", "q")), packed=True
    ),
    Call("chunk_ttt_linear", "float32", 40, 40, options=(("chunk_size", 32),), packed=True, heads=3),
    *(Call(name, dtype, 40, 40) for name in ("l2norm", "rms_norm_gated") for dtype in ("float16", "float32")),
    *(Call("causal_conv1d", dtype, 40, 40, packed=dtype == "float16") for dtype in ("float16", "float32")),
    *(Call(name, "float32", 40, 40) for name in ("fused_gdn_gate", "fused_kda_gate", "fused_beta_sigmoid")),
    *(
        Call(subject, dtype, 24, 40, options=(("chunk_size", chunk),), packed=True, heads=3, scalar=scalar)
        for subject, dtype, chunk, scalar in (
            ("chunk_gla", "bfloat16", 16, False),
            ("chunk_gla", "float32", 64, True),
            ("chunk_gated_delta_product", "bfloat16", 32, False),
        )
    ),
    *(
        Call(f"chunk_{rule}", dtype, 24, 40, options=(("chunk_size", chunk),), packed=True, heads=heads)
        for rule, dtype, chunk, heads in (
            ("dplr_delta_rule", "float16", 32, 1),
            ("iplr_delta_rule", "float32", 16, 1),
            ("rwkv7", "bfloat16", 16, 1),
            ("gdn2", "bfloat16", 32, 3),
            ("comba", "float32", 32, 3),
        )
    ),
    *(Call(subject, K=64, V=64, segments=5) for subject in ("chunk_dplr_delta_rule", "chunk_gdn2", "chunk_comba")),
    *(Call(f"fused_recurrent_{rule}", K=40, V=24, packed=True) for rule in ("gla", "iplr_delta_rule", "comba")),
    Call("fused_mul_recurrent_rwkv7", "float32", 40, 24),
    *(Call(RULES[rule], options=(*GLUON, NORM), packed=True, heads=3) for rule in ("gdn", "kda")),
    Call("chunk_gated_delta_rule, gate inside", options=(*GLUON, NORM), heads=4, segments=5),
    Call("chunk_kda, gate inside", options=GLUON, heads=4, segments=5),
    Call("chunk_gated_delta_rule", K=60, V=100),
    Call("chunk_gated_delta_rule", K=96, V=192, options=GLUON),
    Call("chunk_gated_delta_rule", V=256, options=GLUON),
    *(Call("parallel_path_attn, forget gate", dtype, 40, 24, packed=True) for dtype in ("float16", "float32")),
    *(Call(RULES[rule], K=64, V=64, options=(*GLUON, NORM), packed=True, heads=3) for rule in ("delta_rule", "gdn")),
    Call("chunk_gated_delta_rule", K=64, V=64, options=GLUON, segments=5),
    *(Call("chunk_gated_delta_rule, gate inside", K=256, V=V, options=(*GLUON, NORM), heads=4) for V in (256, 512)),
    Call("chunk_delta_rule", K=256, V=256, options=(*GLUON, NORM), packed=True, heads=3),
    Call("chunk_gdn2", options=(*GLUON, NORM), packed=True),
    Call("chunk_gdn2", options=GLUON, segments=5),
    Call("chunk_gla", options=GLUON, packed=True, heads=3),
    Call("chunk_gla", options=GLUON, segments=5),
    *(Call("chunk_rwkv7", K=K, V=K, options=(("chunk_size", 32),), packed=True, heads=4) for K in (64, 128)),
    Call("chunk_dplr_delta_rule", options=(("chunk_size", 32),), segments=5),
    Call("chunk_gated_delta_rule, gate inside", V=256, options=(*GLUON, NORM), packed=True, heads=4),
)

HORIZON = (
    *(Call(subject, options=(*GLUON, NORM), heads=1, segments=4) for subject in (RULES["gdn"], RULES["kda"])),
    Call(RULES["gdn"], options=GLUON, heads=1, segments=4),
)
"""Calls whose segments have enough chunks for summaries that begin at the exact horizon."""
HORIZON_TOKENS = 4 * 32 * 64 + 2

RACED = (
    *(Call(subject, options=GLUON, heads=1) for subject in RULES.values()),
    Call("chunk_gated_delta_rule", options=aot.STATES, packed=True),
    Call("chunk_kda", options=aot.STATES, packed=True, heads=1),
    *(Call(RULES[rule], options=GLUON, heads=1, segments=5) for rule in ("gdn", "kda")),
    Call("chunk_gated_delta_rule", "float16", 64, 64, heads=1),
    Call("chunk_kda", "float32", 64, 64, heads=1),
    Call("chunk_gated_delta_rule", "float32", 64, 64, wrt=("initial_state",), heads=1, segments=5),
    Call("chunk_delta_rule", K=24, V=40, options=(("chunk_size", 32),), heads=1),
    *(
        Call("chunk_ttt_linear", dtype, D, D, options=(("chunk_size", C),), heads=1)
        for dtype, D, C in (("bfloat16", 64, 16), ("bfloat16", 128, 16), ("float32", 64, 16), ("float16", 64, 64))
    ),
)
"""Race checks of the kernels that loop over a sequence; Gluon's rings of copies come first."""


def memory(device: torch.device) -> dict[str, Callable[[], list[Tensor]]]:
    """Name -> call, for the memory checks; each call returns its results."""
    found = [call for call in (*aot.CALLS, *aot.PER_ARCHITECTURE["sm_90"], *BESIDE) if isinstance(call, aot.Call)]
    found = [call for call in found if call.subject != "solve_tril"]
    named = {str(call): partial(made, call, device, TOKENS) for call in found}
    for chunk in (16, 32, 64):
        for dtype in ("bfloat16", "float32"):
            named[f"solve_tril {dtype} C{chunk}"] = partial(solved, dtype, chunk, device)
    named |= {f"{call}, {HORIZON_TOKENS} tokens": partial(made, call, device, HORIZON_TOKENS) for call in HORIZON}
    for dtype in ("bfloat16", "float32"):
        call = Call("parallel_path_attn, forget gate", dtype, 64, 64, segments=33)
        named[f"{call}, in turns"] = partial(in_turns, call, device)
    named |= {"rank_carry": partial(carried, False, device), "rank_carry, reverse": partial(carried, True, device)}
    return named | {"rank_send": partial(sent, device)} | served(device)


def races(device: torch.device) -> dict[str, Callable[[], list[Tensor]]]:
    """Name -> call, for race checks of the scans."""
    return {str(call): partial(made, call, device, LONG) for call in RACED}


def sides(device: torch.device) -> dict[str, Callable[[], list[Tensor]]]:
    """Calls of the other Gluon kernels, for race checks of their explicit barriers, copies and shared memory."""
    found = [Call(subject, options=GLUON, heads=1) for subject in RULES.values()]
    found.append(Call("chunk_kda, gate inside", options=(*GLUON, NORM), packed=True, heads=1))
    return {f"{call}, two chunks": partial(made, call, device, 66) for call in found}


def made(call: Call, device: torch.device, tokens: int) -> list[Tensor]:
    """Make the call, and its backward if it has one, on tensors that are drawn on the CPU."""
    subject = OPERATOR_SPECS[call.subject]
    T = max(tokens, 64 * call.segments + 2)
    a = subject.arguments(Shape(1, T, 1, call.heads, call.K, call.V), getattr(torch, call.dtype), 0)
    if call.packed:
        a["cu_seqlens"] = torch.tensor([0, 17, 17, T - 3])
        a |= {name: a[name].repeat(3, *[1] * (a[name].ndim - 1)) for name in a if name.startswith("initial_state")}
    a |= dict(call.options)
    a = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in a.items()}
    a |= call.changed(a)
    for name, x in a.items():
        if subject.backward and isinstance(x, Tensor) and x.is_floating_point():
            x.requires_grad_(not call.wrt or name in call.wrt)
    with call.segmented():
        outputs = subject.ours(a | {"backend": "triton"})
    differentiable = [x for x in outputs if x.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.zeros_like(x) for x in differentiable])
    gradients = [x.grad for x in a.values() if isinstance(x, Tensor) and x.grad is not None]
    return [x.detach() for x in outputs] + gradients


def solved(dtype: str, chunk: int, device: torch.device) -> list[Tensor]:
    """`solve_tril`, which reads the strict lower triangle only."""
    A = 0.1 * torch.randn(1, TOKENS, 2, chunk)
    return [wyfold.solve_tril(A.to(getattr(torch, dtype)).to(device), backend="triton")]


def in_turns(call: Call, device: torch.device) -> list[Tensor]:
    """A call of PaTH attention whose backward takes a part of the queries, and of the earlier blocks, in a turn."""
    from wyfold.kernels.path_attention.triton import backward

    with mock.patch.multiple(backward, KEPT_TILES=1, LANES=2, RANGES=3):
        return made(call, device, TOKENS)


def carried(reverse: bool, device: torch.device) -> list[Tensor]:
    """`rank_carry` for the middle one of three ranks with two pieces each."""
    B, HV, K, V, rank = 2, 2, 128, 128, 1
    partition = partition_sequences([0, 7, 25, 60], 60, owned_ranges("zigzag", 60, 3))
    wanted = [piece for piece in partition.pieces[rank] if not (piece.last if reverse else piece.first)]
    n, rows = len(wanted) * B, partition.most_incoming if reverse else partition.most_outgoing
    gathered = torch.randn(3, rows, B, HV, K, V + K) / K
    routes = torch.tensor((backward_routes if reverse else forward_routes)(partition, rank))
    outer, borders = (StateRows(torch.randn(n, HV, V, K).to(device).mT, torch.arange(n).to(device)) for _ in range(2))
    tails = torch.randn(n, HV, K, V + K) / K
    given = gathered.to(device), routes.to(device), outer, borders, tails.to(device)
    table.kernel_module("rank_carry", "triton").rank_carry(*given, reverse=reverse, dtype=torch.bfloat16)
    return [outer.states, borders.states]


def sent(device: torch.device) -> list[Tensor]:
    """`rank_send` of states and maps behind tails."""
    n, HV, K, V = 3, 2, 128, 128
    borders = StateRows(torch.randn(n, HV, V + K, K).to(device).mT, torch.arange(n).to(device))
    tails, out = (torch.randn(n, HV, K, V + K).to(device) for _ in range(2))
    table.kernel_module("rank_carry", "triton").rank_send(borders, tails, out, dtype=torch.bfloat16)
    return [out]


def served(device: torch.device) -> dict[str, Callable[[], list[Tensor]]]:
    """Every operator over a pool, with a skipped row and unordered slots."""
    named: dict[str, Callable[[], list[Tensor]]] = {}
    for rule in ("delta_rule", "gated_delta_rule", "kda"):
        for stored in ("float32", "bfloat16"):
            for name in ("decode", "verify", "prefill", "prefill, states between"):
                named[f"serving.{name} {rule} {stored}"] = partial(_served, name, rule, stored, device)
    for rule in ("gated_delta_rule", "kda"):
        named[f"serving.prefill {rule} in segments"] = partial(_prefill, rule, 128, 128, device)
    named["serving.prefill gated_delta_rule K256 V512"] = partial(_prefill, "gated_delta_rule", 256, 512, device)
    for rule in ("gla", "dplr", "gdn2"):
        for name in ("decode", "verify", "prefill"):
            named[f"serving.{name} {rule}"] = partial(_served_rule, name, rule, device)
    for rule in ("gated_delta_rule", "kda"):
        named[f"serving.decode_packed {rule}"] = partial(_decode_packed, rule, device)
    for name in ("conv1d_update", "conv1d_prefill"):
        named[f"serving.{name}"] = partial(_conv, name, device)
    for D, stored in ((64, "float32"), (128, "bfloat16"), (40, "float32")):
        named[f"serving.ttt_decode D{D} {stored}"] = partial(_ttt_decode, D, stored, device)
    return named


def _served(name: str, rule: str, stored: str, device: torch.device) -> list[Tensor]:
    name, _, between = name.partition(", ")
    T = {"decode": 1, "verify": 3, "prefill": TOKENS}[name]
    K, V = (128, 128) if stored == "bfloat16" else (40, 24)
    gate = None if rule == "delta_rule" else "model"
    dtype = torch.bfloat16 if stored == "bfloat16" else torch.float32
    drawn = inputs.draw("random", rule, Shape(3, T, 1, 2, K, V), gate=gate, beta="logits", dtype=dtype)
    a: dict[str, Any] = {"g": None} | {n: x.to(device) if isinstance(x, Tensor) else x for n, x in drawn.items()}
    pool = torch.randn(12, 2, K, V).to(getattr(torch, stored)).to(device)
    slots = torch.tensor([7, -1, 2])
    more: dict[str, Any] = {}
    if name == "verify":
        slots = torch.tensor([[7, 1, 3], [-1, -1, -1], [2, 9, 11]])
        more["num_accepted_tokens"] = torch.tensor([1, 1, 2]).to(device)
    if between:
        more |= {"checkpoint_every": 64, "checkpoint_pool": torch.zeros_like(pool)}
        more["checkpoint_indices"] = torch.tensor([[0, 3], [-1, 4], [11, -1]]).to(device)
    o = getattr(serving, name)(
        **a, pool=pool, state_indices=slots.to(device), state_v_first=False, use_qk_l2norm_in_kernel=True,
        backend="triton", **more,
    )  # fmt: skip
    return [o, pool]


def _prefill(rule: str, K: int, V: int, device: torch.device) -> list[Tensor]:
    """Prompts from and into slots, in five segments if their states are narrow enough."""
    drawn = inputs.draw(
        "random", rule, Shape(2, 64 * 5 + 2, 1, 2, K, V), gate="model", beta="logits", dtype=torch.bfloat16
    )
    pool, slots = torch.randn(6, 2, V, K).to(device), torch.tensor([5, 2]).to(device)
    a: dict[str, Any] = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in drawn.items()}
    with segment_rule.forced(5):
        o = serving.prefill(
            **a, pool=pool, state_indices=slots, state_v_first=True, use_qk_l2norm_in_kernel=True, backend="triton"
        )
    return [o, pool]


def _served_rule(name: str, rule: str, device: torch.device) -> list[Tensor]:
    """Serving of a rule beside the delta family, with its further tokens."""
    T = {"decode": 1, "verify": 3, "prefill": TOKENS}[name]
    drawn = {"gla": "gla", "dplr": "dplr_delta_rule", "gdn2": "gdn2"}[rule]
    a = inputs.draw("random", drawn, Shape(3, T, 1, 2, 40, 24), gate="weak")
    a = {{"gk": "g"}.get(n, n): x.to(device) for n, x in a.items()}
    slots = torch.tensor([[7, 1, 3], [-1, -1, -1], [2, 9, 11]] if name == "verify" else [7, -1, 2]).to(device)
    pool = torch.randn(12, 2, 40, 24).to(device)
    given = {"pool": pool, "state_indices": slots, "rule": rule, "state_v_first": False, "backend": "triton"}
    return [getattr(serving, name)(**a, beta=None, **given), pool]


def _decode_packed(rule: str, device: torch.device) -> list[Tensor]:
    H, HV, K, V, N = 2, 4, 128, 128, 3
    mixed = torch.randn(N, 2 * H * K + HV * V).bfloat16().to(device)
    raw_g = torch.randn(N, HV) if rule == "gated_delta_rule" else torch.randn(N, HV * K)
    A_log, dt_bias = torch.rand(HV).to(device), torch.zeros(raw_g.shape[1]).to(device)
    pool, slots = torch.randn(8, HV, V, K).to(device), torch.tensor([5, -1, 0]).to(device)
    o = serving.decode_packed(
        mixed, raw_g.bfloat16().to(device), torch.randn(N, HV).bfloat16().to(device), A_log, dt_bias, pool, slots,
        heads=(H, HV), dims=(K, V), state_v_first=True, backend="triton",
    )  # fmt: skip
    return [o, pool]


def _conv(name: str, device: torch.device) -> list[Tensor]:
    D, T = 200, 1 if name == "conv1d_update" else 37
    x, pool, weight = (torch.randn(size).to(device) for size in ((3, T, D), (8, D, 5), (D, 4)))
    slots = torch.tensor([6, -1, 1]).to(device)
    y = getattr(serving, name)(x, pool, weight, activation="silu", state_indices=slots, backend="triton")
    return [y, pool]


def _ttt_decode(D: int, stored: str, device: torch.device) -> list[Tensor]:
    dtype = getattr(torch, stored)
    q, k, v = (torch.randn(3, 1, 2, D).bfloat16().to(device) for _ in range(3))
    S, c = torch.randn(6, 2, D, D).to(dtype).to(device), torch.randn(6, 2, 1, D).to(dtype).to(device)
    position = torch.tensor([15, 0, 3, 0, 0, 7], dtype=torch.int32).to(device)
    pool = TTTState(S, c, torch.zeros_like(S), torch.zeros_like(c), position)
    w, b = torch.ones(2, D).to(device), torch.zeros(2, D).to(device)
    o = serving.ttt_decode(q, k, v, w, b, 0.1, pool, torch.tensor([5, -1, 0]).to(device), backend="triton")
    return [o, S, c]


def planted(device: torch.device) -> dict[str, Callable[[], list[Tensor]]]:
    """Faults that a sanitizer must report: a write behind a tensor, and a race."""
    from tools.proofs import planted

    return {
        "planted: a write behind a tensor": partial(planted.behind_a_tensor, device),
        "planted: a race": partial(planted.race, device),
    }


@contextlib.contextmanager
def launched_kernels() -> Iterator[dict[str, None]]:
    """Context manager that collects the names of Wyfold's launched kernels."""
    from triton.runtime.jit import JITFunction

    names: dict[str, None] = {}
    usual = JITFunction.run

    def run(self: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        if not warmup:
            names[self.fn.__name__] = None
        return usual(self, *arguments, warmup=warmup, **options)

    JITFunction.run = run
    try:
        yield names
    finally:
        JITFunction.run = usual
