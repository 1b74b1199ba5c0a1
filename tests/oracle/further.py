"""Random calls of GLA, DeltaProduct, the rules whose transition is diagonal plus low rank, and PaTH attention."""

from collections.abc import Callable
from typing import Any

import torch
from tests.oracle import loops
from tests.oracle.calls import Call, Draw, describe, keys, log_gates, on_device_of, work_type
from tests.oracle.loops import Update, exact
from torch import Tensor

import wyfold

LEFT_OUT = 0.1
"""Share of the calls without an argument that may be left out."""


class Arguments:
    """Arguments of one call while they are drawn."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.dtype = draw.choose(*draw.dtypes)
        self.further = draw.further_dtype(self.dtype)
        self.views: dict[str, Callable[[Tensor], Tensor]] = {}
        self.leaves: dict[str, Tensor] = {}
        self.options: dict[str, Any] = dict(draw.backend)
        self.loop_options: dict[str, Any] = {}

    def row(self, name: str, x: Tensor) -> None:
        """A tensor with the dtype of q."""
        self.leaves[name] = self.draw.layout(x, self.views, name).to(self.dtype)

    def any(self, name: str, x: Tensor) -> None:
        """A tensor of any float."""
        self.leaves[name] = self.draw.layout(x, self.views, name).to(self.further())

    def shared(self, **options: Any) -> None:
        """Options that operator and loop both have."""
        self.options |= options
        self.loop_options |= options


def linear_call(draw: Draw, operator: str) -> Call:
    """GLA, DeltaProduct, DPLR, IPLR, RWKV-7, GDN-2 and Comba, in both forms."""
    rule = operator.removeprefix("chunk_").removeprefix("fused_").removeprefix("mul_").removeprefix("recurrent_")
    rule = "mul_rwkv7" if "mul" in operator else rule
    packed = draw.chance(0.5)
    B, T, H = (1 if packed else draw.choose(1, 1, 2)), draw.length(), draw.choose(1, 2)
    HV, K, V = H * draw.choose(1, 1, 2, 3), draw.choose(8, 16, 24, 32), draw.choose(8, 16, 24, 32)
    n = draw.choose(1, 2, 2, 3) if "product" in rule else 1
    a = Arguments(draw)
    if "product" in rule:
        a.options["num_householder"] = n
    _rows(draw, a, rule, B, T, H, HV, K, V, n)
    if draw.chance(0.3):
        a.shared(scale=draw.choose(1.0, 0.37, -2.0))
    elif "rwkv7" in rule:
        a.loop_options["scale"] = 1.0
    N, bounds = B, None
    if packed:
        bounds = draw.boundaries(T)
        N = len(bounds) - 1
        a.options["cu_seqlens"] = wyfold.SequenceLayout(bounds, T) if draw.chance(0.3) else bounds
        a.loop_options["cu_seqlens"] = bounds
    if draw.chance(0.3):
        a.shared(state_v_first=True)
    if draw.chance(0.6):
        shape = (V, K) if a.options.get("state_v_first") else (K, V)
        a.leaves["initial_state"] = draw.normal(N, HV, *shape).to(draw.choose(*draw.narrow))
    if draw.chance(0.7):
        a.options["output_final_state"] = True
        if draw.chance(0.4):
            a.options["state_dtype"] = draw.choose(*draw.narrow)
    if operator.startswith("chunk"):
        if draw.chance(0.6):
            a.options["chunk_size"] = draw.choose(16, 32, 64)
            if draw.backend and rule not in ("gla", "gated_delta_product"):
                # These calls are in float32, whose gradients of low-rank rules do not fit in chunks of 64.
                a.options["chunk_size"] = min(a.options["chunk_size"], 32)
        if draw.chance(0.3):
            a.options["disable_recompute"] = True
    function = getattr(wyfold, operator)

    def run(**tensors: Tensor) -> dict[str, Tensor]:
        returned = function(**tensors, **on_device_of(tensors, a.options))
        return {name: x for name, x in zip(("o", "state"), returned, strict=False) if x is not None}

    def loop(at: Any = exact, seen: Any = None, **tensors: Any) -> dict[str, Tensor]:
        initial = tensors.pop("initial_state", None)
        q, updates, g = _updates(rule, n, HV, tensors, a.options, at)
        before = rule in ("dplr_delta_rule", "rwkv7", "mul_rwkv7", "comba")
        o, state = loops.linear(q, updates, g, before=before, initial_state=initial, at=at, seen=seen, **a.loop_options)
        return {"o": o} | ({"state": state} if a.options.get("output_final_state") else {})

    return Call(
        operator, a.leaves, a.views, run, loop, max(K, V, 64), work_type(a.leaves),
        padding=int(bounds[-1]) if bounds is not None and n == 1 else None,
        text=describe(operator, a.leaves, a.views, a.options),
    )  # fmt: skip


def _rows(draw: Draw, a: Arguments, rule: str, B: int, T: int, H: int, HV: int, K: int, V: int, n: int) -> None:
    """The tensors of tokens. Rows that erase are of length 1 at most, so that states stay small."""
    rwkv7 = "rwkv7" in rule
    a.row("r" if rwkv7 else "q", draw.normal(B, T, H, K) / K**0.5)
    unit = keys(draw, B, n * T, H, K)
    free = rule == "gla" or rwkv7 or "plr" in rule  # nothing erases along k
    if (rule in ("gdn2", "comba") or "product" in rule) and draw.chance(0.4):
        a.options["use_qk_l2norm_in_kernel"] = True
        unit = unit * 10 ** (2 * draw.uniform(B, n * T, H, 1) - 1)
    a.row("k", draw.normal(B, T, H, K) if free else unit)
    a.row("v", draw.normal(B, n * T, HV, V))
    if "plr" in rule or rule == "rwkv7":
        kk = keys(draw, B, T, H, K)
        a.row("a", -kk)
        column = draw.uniform(B, T, H, K) * kk if draw.chance(0.7) else 0.5 * keys(draw, B, T, H, K)
        a.row("b", column)
    if rule == "mul_rwkv7":
        a.row("kk", keys(draw, B, T, H, K))
        a.row("a", draw.uniform(B, T, H, K))
    if rule == "gdn2":
        for name, width in (("b", K), ("w", V)):
            if not draw.chance(LEFT_OUT):
                a.any(name, draw.uniform(B, T, HV, width))
    if rule == "comba" and not draw.chance(LEFT_OUT):
        a.row("p", draw.choose(0.5, 1.0) * keys(draw, B, T, H, K))
    if (rule == "comba" or "product" in rule) and not draw.chance(LEFT_OUT):
        a.any("beta", draw.uniform(B, n * T, HV))
    kinds = {"gla": ((), (K,)), "gated_delta_product": ((), (K,)), "comba": ((),), "iplr_delta_rule": ()}
    choices = kinds.get(rule, ((K,),))
    if choices and not draw.chance(LEFT_OUT):
        name = "w" if rwkv7 else "gk" if "dplr" in rule else "g"
        a.any(name, log_gates(draw, B, T, HV, *draw.choose(*choices)))
        if name in ("w", "gk") and "mul" not in rule and draw.chance(0.3):
            a.options |= {"safe_gate": True, "lower_bound": -draw.choose(0.5, 3.0)}
    elif rwkv7:
        a.options["w"] = None


def _updates(
    rule: str, n: int, HV: int, x: dict[str, Tensor], options: dict[str, Any], at: Any
) -> tuple[Tensor, list[Update], Tensor | None]:
    """Queries, updates and log decays of each value head, as the docstring of the operator defines them."""
    q, k, v = at(x["r"] if "r" in x else x["q"]), at(x["k"]), at(x["v"])
    p = at(x["p"]) if "p" in x else None
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = loops.rows_to_unit(q, at=at), loops.rows_to_unit(k, at=at)
        p = None if p is None else loops.rows_to_unit(p, at=at)

    def heads(rows: Tensor) -> Tensor:
        return rows.repeat_interleave(HV // rows.shape[2], 2)

    q, k = heads(q), heads(k)
    g = x.get("gk", x.get("w") if "rwkv7" in rule else x.get("g"))
    if g is not None and options.get("safe_gate"):
        g = g.clamp(min=options["lower_bound"])
    if rule == "gla":
        return q, [Update(None, None, k, v)], g
    if rule == "mul_rwkv7":
        kk = heads(at(x["kk"]))
        return q, [Update(-kk, at(kk * heads(at(x["a"]))), k, v)], g
    if rule == "gdn2":
        erased = at(at(x["b"]) * k) if "b" in x else k
        return q, [Update(-erased, k, k, at(at(x["w"]) * v) if "w" in x else v)], g
    if "a" in x:
        return q, [Update(heads(at(x["a"])), heads(at(x["b"])), k, v)], g
    strength = at(x["beta"])[..., None] if "beta" in x else torch.ones_like(v[..., :1])
    column = at(strength * k)
    if rule == "comba":
        row = k if p is None else heads(p)
        return q, [Update(-row, column, column, v)], g
    each = [[rows.unflatten(1, (rows.shape[1] // n, n))[:, :, j] for rows in (k, column, v)] for j in range(n)]
    return q, [Update(-key, written, written, value) for key, written, value in each], g


def path_call(draw: Draw, operator: str) -> Call:
    packed = draw.chance(0.5)
    B, T, H = (1 if packed else draw.choose(1, 1, 2)), draw.length(70), draw.choose(1, 2)
    HQ, K, V = H * draw.choose(1, 1, 2, 3), draw.choose(8, 16, 24, 32), draw.choose(8, 16, 24, 32)
    a = Arguments(draw)
    a.row("q", draw.normal(B, T, HQ, K))
    a.row("k", draw.normal(B, T, H, K))
    a.row("v", draw.normal(B, T, H, V))
    a.any("w", keys(draw, B, T, H, K))
    a.any("beta", 2 * draw.uniform(B, T, H))
    if draw.chance(0.6):
        a.any("g", -draw.choose(0.01, 1.0) * draw.uniform(B, T, HQ))
        if draw.chance(0.5):
            a.shared(gate_scaled=False)
    if draw.chance(0.3):
        a.shared(scale=draw.choose(1.0, 0.37))
    bounds = draw.boundaries(T) if packed else None
    if bounds is not None:
        a.options["cu_seqlens"] = wyfold.SequenceLayout(bounds, T) if draw.chance(0.3) else bounds
        a.loop_options["cu_seqlens"] = bounds

    def run(**tensors: Tensor) -> dict[str, Tensor]:
        return {"o": wyfold.parallel_path_attn(**tensors, **on_device_of(tensors, a.options))[0]}

    def loop(at: Any = exact, seen: Any = None, **tensors: Any) -> dict[str, Tensor]:
        return {"o": loops.path(**{name: at(x) for name, x in tensors.items()}, **a.loop_options, at=at)}

    return Call(
        operator, a.leaves, a.views, run, loop, max(K, V, 64, T), work_type(a.leaves),
        padding=int(bounds[-1]) if bounds is not None else None,
        text=describe(operator, a.leaves, a.views, a.options),
    )  # fmt: skip


RULES = ("gla", "gated_delta_product", "dplr_delta_rule", "iplr_delta_rule", "rwkv7", "gdn2", "comba")
OPERATORS: dict[str, Callable[[Draw, str], Call]] = {
    **{f"{form}_{rule}": linear_call for rule in RULES for form in ("chunk", "fused_recurrent")},
    "fused_mul_recurrent_rwkv7": linear_call,
    "parallel_path_attn": path_call,
}
