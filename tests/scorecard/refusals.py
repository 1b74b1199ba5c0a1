"""Invalid calls, and the argument that each refusal must name.

Every entry takes valid arguments and makes one of them invalid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import wyfold
from wyfold.cli.operators import OPERATOR_SPECS, Arguments
from wyfold.reference.shapes import Shape

SHAPE = Shape(2, 20, 2, 4, 16, 24)

Spoil = Callable[[Arguments], Arguments]


@dataclass(frozen=True)
class Refusal:
    """One invalid call.

    Attributes:
        operator: Public name.
        argument: Argument that the message must name.
        wrong: What is wrong with it.
        spoil: Valid arguments -> arguments to replace or add.
        error: Exception that must be raised.
    """

    operator: str
    argument: str
    wrong: str
    spoil: Spoil
    error: type[Exception] = ValueError

    def __str__(self) -> str:
        return f"{self.operator}: {self.argument} {self.wrong}"

    def arguments(self) -> Arguments:
        """Keyword arguments of the invalid call, without those that are `OMITTED`."""
        right = right_arguments(self.operator)
        return {name: x for name, x in (right | self.spoil(right)).items() if x is not OMITTED}


OMITTED = object()


def right_arguments(operator: str, seed: int = 0) -> Arguments:
    """Valid arguments of the operator."""
    drawn = OPERATOR_SPECS[operator].arguments(SHAPE, torch.float32, seed)
    if operator in ("solve_tril", "chunk_scaled_dot_kkt"):
        return drawn
    return {name: x for name, x in drawn.items() if name not in ("initial_state_bias",) or "ttt" in operator}


def _cut(x: Tensor, dim: int, size: int) -> Tensor:
    return x.narrow(dim, 0, size)


def _grown(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_zeros(shape)


def _packed(right: Arguments, cu: Any, *, B: int = 1) -> Arguments:
    """Arguments of a packed call: the first `B` rows of the tokens, and boundaries."""
    tokens: Arguments = {name: right[name][:B] for name in ("q", "k", "v", "g", "beta", "eta") if name in right}
    dropped: Arguments = {name: OMITTED for name in ("initial_state", "initial_state_bias") if name in right}
    return {**tokens, **dropped, "cu_seqlens": cu}


def _wide(**sizes: int) -> Spoil:
    """Change widths consistently, without initial states."""

    def spoil(right: Arguments) -> Arguments:
        wide = {"initial_state": OMITTED}
        if "K" in sizes:
            wide |= {name: _grown(right[name], -1, sizes["K"]) for name in ("q", "k")}
            if right["g"].ndim == 4:
                wide["g"] = _grown(right["g"], -1, sizes["K"])
        if "V" in sizes:
            wide["v"] = _grown(right["v"], -1, sizes["V"])
        return wide

    return spoil


def _set(**values: Any) -> Spoil:
    return lambda right: values


GDN, KDA, DELTA, TTT = "chunk_gated_delta_rule", "chunk_kda", "chunk_delta_rule", "chunk_ttt_linear"
RECURRENT, RECURRENT_TTT = "fused_recurrent_kda", "fused_recurrent_ttt_linear"


def _of_tokens() -> list[Refusal]:
    """Refusals of q, k, v, g, beta."""
    meta = lambda name: lambda right: {name: right[name].to("meta")}
    return [
        Refusal(GDN, "q", "is a list", lambda r: {"q": r["q"].tolist()}, TypeError),
        Refusal(GDN, "q", "is missing", _set(q=OMITTED), TypeError),
        Refusal(GDN, "q", "without a batch", lambda r: {"q": r["q"][0]}),
        Refusal(GDN, "q", "of integers", lambda r: {"q": r["q"].int()}),
        Refusal(GDN, "q", "complex", lambda r: {"q": r["q"].to(torch.complex64)}),
        Refusal(GDN, "k", "with fewer tokens", lambda r: {"k": _cut(r["k"], 1, 19)}),
        Refusal(GDN, "k", "with fewer heads", lambda r: {"k": _cut(r["k"], 2, 1)}),
        Refusal(GDN, "k", "narrower than q", lambda r: {"k": _cut(r["k"], 3, 8)}),
        Refusal(GDN, "k", "in another batch", lambda r: {"k": _cut(r["k"], 0, 1)}),
        Refusal(GDN, "k", "in another dtype", lambda r: {"k": r["k"].bfloat16()}),
        Refusal(GDN, "k", "on another device", meta("k")),
        Refusal(GDN, "v", "without heads", lambda r: {"v": r["v"][:, :, 0]}),
        Refusal(GDN, "v", "in another dtype", lambda r: {"v": r["v"].double()}),
        Refusal(GDN, "v", "with 3 heads over 2", lambda r: {"v": _cut(r["v"], 2, 3), "g": OMITTED, "beta": OMITTED}),
        Refusal(
            GDN, "v", "with fewer heads than k", lambda r: {"v": _cut(r["v"], 2, 1), "g": OMITTED, "beta": OMITTED}
        ),
        Refusal(GDN, "v", "head first", lambda r: {"v": r["v"].transpose(1, 2)}),
        Refusal(GDN, "g", "per channel", lambda r: {"g": r["g"][..., None].expand(-1, -1, -1, 16)}),
        Refusal(GDN, "g", "per key head", lambda r: {"g": _cut(r["g"], 2, 2)}),
        Refusal(GDN, "g", "of integers", lambda r: {"g": r["g"].int()}),
        Refusal(GDN, "g", "a number", _set(g=-0.1), TypeError),
        Refusal(KDA, "g", "per head", lambda r: {"g": r["g"][..., 0]}),
        Refusal(KDA, "g", "with V channels", lambda r: {"g": _grown(r["g"], 3, 24)}),
        Refusal(KDA, "g", "on another device", meta("g")),
        Refusal(DELTA, "g", "given to a rule without gate", lambda r: {"g": r["beta"]}, TypeError),
        Refusal(DELTA, "beta", "without heads", lambda r: {"beta": r["beta"][..., 0]}),
        Refusal(DELTA, "beta", "with a last axis of 1", lambda r: {"beta": r["beta"][..., None]}),
        Refusal(DELTA, "beta", "per key head", lambda r: {"beta": _cut(r["beta"], 2, 2)}),
        Refusal(DELTA, "beta", "of booleans", lambda r: {"beta": r["beta"] > 0.5}),
        Refusal(GDN, "K", "of 264", _wide(K=264)),
        Refusal(KDA, "K", "of 264", _wide(K=264)),
        Refusal(DELTA, "V", "of 520", _wide(V=520)),
        Refusal(RECURRENT, "V", "of 520", _wide(V=520)),
    ]


def _of_states() -> list[Refusal]:
    """Refusals of states, their layout and dtype."""
    return [
        Refusal(GDN, "initial_state", "of another batch", lambda r: {"initial_state": r["initial_state"][:1]}),
        Refusal(GDN, "initial_state", "V first unasked", lambda r: {"initial_state": r["initial_state"].mT}),
        Refusal(GDN, "initial_state", "K first with state_v_first", _set(state_v_first=True)),
        Refusal(GDN, "initial_state", "of integers", lambda r: {"initial_state": r["initial_state"].int()}),
        Refusal(
            GDN,
            "initial_state",
            "float64 with float32 tokens",
            lambda r: {"initial_state": r["initial_state"].double()},
        ),
        Refusal(GDN, "initial_state", "a bool", _set(initial_state=True), TypeError),
        Refusal(GDN, "state_dtype", "an integer dtype", _set(state_dtype=torch.int8)),
        Refusal(GDN, "state_dtype", "float64 with float32 tokens", _set(state_dtype=torch.float64)),
        Refusal(GDN, "state_dtype", "a string", _set(state_dtype="bfloat16"), TypeError),
        Refusal(KDA, "output_final_state", "1", _set(output_final_state=1), TypeError),
        Refusal(KDA, "state_v_first", "None", _set(state_v_first=None), TypeError),
        Refusal(
            TTT,
            "initial_state_bias",
            "without its axis of 1",
            lambda r: {"initial_state_bias": r["initial_state_bias"][:, :, 0]},
        ),
        Refusal(RECURRENT_TTT, "state", "a tensor", lambda r: {"state": r["v"]}, TypeError),
        Refusal(
            "causal_conv1d", "initial_state", "too short", lambda r: {"initial_state": _cut(r["initial_state"], 2, 2)}
        ),
    ]


def _of_boundaries() -> list[Refusal]:
    """Refusals of cu_seqlens and cu_seqlens_cpu."""
    cu = lambda *values, **options: lambda r: _packed(r, torch.tensor(values, **options))
    return [
        Refusal(GDN, "cu_seqlens", "with a batch of 2", lambda r: _packed(r, torch.tensor([0, 20]), B=2)),
        Refusal(GDN, "cu_seqlens", "of floats", cu(0.0, 20.0)),
        Refusal(GDN, "cu_seqlens", "of int16", cu(0, 20, dtype=torch.int16)),
        Refusal(GDN, "cu_seqlens", "a list", lambda r: _packed(r, [0, 20]), TypeError),
        Refusal(GDN, "cu_seqlens", "in two dimensions", cu([0, 20])),
        Refusal(GDN, "cu_seqlens", "with no boundary at all", cu(dtype=torch.int64)),
        Refusal(GDN, "cu_seqlens", "decreasing", cu(0, 9, 5, 20)),
        Refusal(GDN, "cu_seqlens", "not from 0", cu(1, 20)),
        Refusal(KDA, "cu_seqlens", "beyond the buffer", cu(0, 21)),
        Refusal(TTT, "cu_seqlens", "decreasing", cu(0, 9, 5, 20)),
        Refusal(
            GDN,
            "cu_seqlens",
            "a layout of other tokens",
            lambda r: _packed(r, wyfold.SequenceLayout.from_lengths([9, 9])),
        ),
        Refusal(GDN, "cu_seqlens_cpu", "alone", _set(cu_seqlens_cpu=torch.tensor([0, 20]))),
        Refusal(
            GDN,
            "cu_seqlens_cpu",
            "of another length",
            lambda r: _packed(r, torch.tensor([0, 20])) | {"cu_seqlens_cpu": torch.tensor([0, 9, 20])},
        ),
        Refusal("solve_tril", "cu_seqlens", "with a batch of 2", _set(cu_seqlens=torch.tensor([0, 20]))),
        Refusal("causal_conv1d", "cu_seqlens", "with a batch of 2", _set(cu_seqlens=torch.tensor([0, 20]))),
    ]


def _of_options() -> list[Refusal]:
    """Refusals of flags, numbers and invalid combinations."""
    given = lambda name, size: lambda r: {name: r["v"].new_zeros(size)}
    return [
        Refusal(GDN, "scale", "a string", _set(scale="1"), TypeError),
        Refusal(GDN, "scale", "NaN", _set(scale=math.nan)),
        Refusal(GDN, "use_qk_l2norm_in_kernel", "None", _set(use_qk_l2norm_in_kernel=None), TypeError),
        Refusal(GDN, "batch_invariant", "a string", _set(batch_invariant="yes"), TypeError),
        Refusal(GDN, "allow_neg_eigval", "without the sigmoid", _set(allow_neg_eigval=True)),
        Refusal(GDN, "beta", "missing for its sigmoid", _set(beta=None, use_beta_sigmoid_in_kernel=True)),
        Refusal(GDN, "checkpoint_every", "beyond int64", _set(checkpoint_every=2**70, return_intermediate_states=True)),
        Refusal(GDN, "max_splits", "beyond int64", _set(max_splits=2**63)),
        Refusal(GDN, "checkpoint_every", "without return_intermediate_states", _set(checkpoint_every=64)),
        Refusal(GDN, "checkpoint_every", "0", _set(checkpoint_every=0, return_intermediate_states=True)),
        Refusal(
            GDN,
            "checkpoint_every",
            "no multiple of a chunk",
            _set(checkpoint_every=24, return_intermediate_states=True),
        ),
        Refusal(
            GDN, "checkpoint_every", "a float", _set(checkpoint_every=64.0, return_intermediate_states=True), TypeError
        ),
        Refusal(GDN, "chunk_size", "48", _set(chunk_size=48)),
        Refusal(KDA, "chunk_size", "0", _set(chunk_size=0)),
        Refusal(TTT, "chunk_size", "8", _set(chunk_size=8)),
        Refusal("chunk_scaled_dot_kkt", "chunk_size", "128", _set(chunk_size=128)),
        Refusal(GDN, "A_log", "without the gate", given("A_log", 4)),
        Refusal(KDA, "dt_bias", "without the gate", given("dt_bias", (4, 16))),
        Refusal(KDA, "lower_bound", "without the gate", _set(lower_bound=-5.0)),
        Refusal(GDN, "lower_bound", "given to a rule without bound", _set(lower_bound=-5.0), TypeError),
        Refusal(GDN, "g", "missing for its gate", _set(g=None, use_gate_in_kernel=True)),
        Refusal(KDA, "g", "missing for safe_gate", _set(g=None, safe_gate=True)),
        Refusal(GDN, "A_log", "of another size", lambda r: given("A_log", 3)(r) | {"use_gate_in_kernel": True}),
        Refusal(GDN, "dt_bias", "per channel", lambda r: given("dt_bias", (4, 16))(r) | {"use_gate_in_kernel": True}),
        Refusal(KDA, "dt_bias", "per head", lambda r: given("dt_bias", 4)(r) | {"use_gate_in_kernel": True}),
        Refusal(KDA, "lower_bound", "0", _set(lower_bound=0.0, use_gate_in_kernel=True)),
        Refusal(KDA, "lower_bound", "NaN", _set(lower_bound=math.nan, use_gate_in_kernel=True)),
        Refusal(KDA, "lower_bound", "below -5 with safe_gate", _set(lower_bound=-6.0, safe_gate=True)),
        Refusal(DELTA, "max_splits", "0", _set(max_splits=0)),
        Refusal(GDN, "backend", "unknown", _set(backend="cuda")),
        Refusal(GDN, "backend", "one that cannot", _set(backend="gluon"), wyfold.UnsupportedError),
        Refusal("rms_norm_gated", "backend", "one that cannot", _set(backend="triton"), wyfold.UnsupportedError),
        *(
            Refusal(operator, word, "is no keyword", _set(**{word: None}), TypeError)
            for operator, word in (
                (GDN, "head_first"),
                (RECURRENT, "max_splits"),
                (RECURRENT, "chunk_size"),
                (RECURRENT, "cp_context"),
            )
        ),
        *(
            Refusal(operator, "cp_context", "a string", _set(cp_context="a group"), TypeError)
            for operator in (KDA, TTT, "causal_conv1d")
        ),
    ]


def _of_others() -> list[Refusal]:
    """Refusals of TTT-Linear, solve_tril, kkt, convolution, norms and gates."""
    return [
        Refusal(
            TTT,
            "v",
            "of another width than k",
            lambda r: {name: _grown(r[name], -1, 24) for name in ("v", "w", "b")} | {"initial_state": OMITTED},
        ),
        Refusal(TTT, "w", "without heads", lambda r: {"w": r["w"][0]}),
        Refusal(TTT, "b", "of another width", lambda r: {"b": _cut(r["b"], 1, 8)}),
        Refusal(TTT, "eta", "without heads", lambda r: {"eta": r["eta"][:, :, 0, 0]}),
        Refusal(TTT, "eta", "a string", _set(eta="0.1"), TypeError),
        Refusal(TTT, "eta_col", "without heads", lambda r: {"eta_col": r["eta"][:, :, 0, 0]}),
        Refusal(TTT, "eta_col", "a string", _set(eta_col="1"), TypeError),
        Refusal(TTT, "residual", "v", _set(residual="v")),
        Refusal(TTT, "eps", "0", _set(eps=0.0)),
        Refusal("solve_tril", "A", "of 48 columns", lambda r: {"A": _cut(r["A"], 3, 48)}),
        Refusal("solve_tril", "A", "without heads", lambda r: {"A": r["A"][:, :, 0]}),
        Refusal("solve_tril", "A", "that requires a gradient", lambda r: {"A": r["A"].clone().requires_grad_()}),
        Refusal("solve_tril", "output_dtype", "an integer dtype", _set(output_dtype=torch.int32)),
        Refusal(
            "chunk_scaled_dot_kkt", "beta", "of 3 heads over 2", lambda r: {"beta": _cut(r["beta"], 2, 3), "g": None}
        ),
        Refusal(
            "chunk_scaled_dot_kkt", "k", "that requires a gradient", lambda r: {"k": r["k"].clone().requires_grad_()}
        ),
        Refusal("causal_conv1d", "weight", "of one tap", lambda r: {"weight": _cut(r["weight"], 1, 1)}),
        Refusal("causal_conv1d", "weight", "of nine taps", lambda r: {"weight": _grown(r["weight"], 1, 9)}),
        Refusal("causal_conv1d", "weight", "of other channels", lambda r: {"weight": _cut(r["weight"], 0, 8)}),
        Refusal("causal_conv1d", "x", "without a batch", lambda r: {"x": r["x"][0]}),
        Refusal("causal_conv1d", "activation", "unknown", _set(activation="relu")),
        Refusal("causal_conv1d", "residual", "of fewer tokens", lambda r: {"residual": _cut(r["residual"], 1, 19)}),
        Refusal("rms_norm_gated", "g", "of another shape", lambda r: {"g": _cut(r["g"], 1, 19)}),
        Refusal("rms_norm_gated", "weight", "of another width", lambda r: {"weight": r["weight"][:8]}),
        Refusal("rms_norm_gated", "activation", "unknown", _set(activation="gelu")),
        Refusal("rms_norm_gated", "eps", "0", _set(eps=0.0)),
        Refusal("l2norm", "x", "of integers", lambda r: {"x": r["x"].int()}),
        Refusal("l2norm", "eps", "below 0", _set(eps=-1e-6)),
        Refusal("fused_gdn_gate", "A_log", "of another size", lambda r: {"A_log": r["A_log"][:3]}),
        Refusal("fused_kda_gate", "lower_bound", "above 0", _set(lower_bound=1.0)),
        Refusal("fused_kda_gate", "dt_bias", "per head", lambda r: {"dt_bias": r["dt_bias"][:, 0]}),
        Refusal("fused_beta_sigmoid", "x", "of integers", lambda r: {"x": r["x"].int()}),
        Refusal("fused_beta_sigmoid", "scale", "infinite", _set(scale=math.inf)),
    ]


REFUSALS = (*_of_tokens(), *_of_states(), *_of_boundaries(), *_of_options(), *_of_others())
