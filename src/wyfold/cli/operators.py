"""Catalogue of the public operators: how to draw arguments, call operator and token loop, and judge the results.

`verify`, `bench`, `tune` and the tests share this list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wyfold
from wyfold import reference
from wyfold.reference import error, inputs, targets
from wyfold.reference.shapes import Shape

Arguments = dict[str, Any]
Named = dict[str, Tensor]
ArgumentMaker = Callable[[Shape, torch.dtype, int], Arguments]
"""(shape, dtype, seed) -> keyword arguments."""

GRADIENT_OF = {"initial_state": "dh0", "initial_state_bias": "dc0"}
"""Argument -> name of its gradient, where that is not "d" and the argument's name."""

PER_TOKEN = {"dbeta": 3, "dg": 3, "deta": 3}
"""Gradient -> number of dimensions for which its error is computed over rows of 64 tokens of one head."""

HOST = torch.device("cpu")
NARROW = (torch.bfloat16, torch.float16)
FED = 1 << 20
"""Added to the seed for output gradients, which must not be parallel to the inputs: gradients would be zero."""


@dataclass(frozen=True)
class OperatorSpec:
    """One operator with one set of options.

    Attributes:
        name: Name in tables: the operator, and its options if there are several entries.
        operator: Public name.
        loop: Name of the token loop in `wyfold.reference` that defines it.
        arguments: (shape, dtype, seed) -> keyword arguments for operator and loop.
        outputs: Names of the returned tensors, in order.
        backward: Whether it is differentiable.
        family: Family of the inputs, which selects the absolute targets.
        fixed: Keywords for the operator alone, not for the loop.
        kernels: Whether it has kernels. Without them it runs on the eager backend alone.
    """

    name: str
    operator: str
    loop: str
    arguments: ArgumentMaker
    outputs: tuple[str, ...] = ("y",)
    backward: bool = True
    family: str = "random"
    fixed: Mapping[str, Any] | None = None
    kernels: bool = True

    def ours(self, arguments: Arguments) -> tuple[Tensor, ...]:
        """Call the operator. Returns the tensors named by `outputs`."""
        return self._results(getattr(wyfold, self.operator)(**arguments, **(self.fixed or {})))

    def ours_on(self, device: torch.device, arguments: Arguments) -> tuple[Tensor, ...]:
        """Call the operator on a device. Arguments are moved there from the CPU, results and gradients back."""
        moved = self.on(device, arguments)
        return tuple(x.to(HOST) for x in self.ours(moved | {"backend": self.backend(moved)}))

    def on(self, device: torch.device, arguments: Arguments) -> Arguments:
        """The arguments with every tensor on a device."""
        return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}

    def backend(self, arguments: Arguments) -> str:
        """Backend on the arguments' device: the dispatch table's choice, or eager if it has none."""
        try:
            return wyfold.explain(getattr(wyfold, self.operator), **arguments, **(self.fixed or {})).backend
        except wyfold.UnsupportedError:
            return "eager"

    def truth(self, arguments: Arguments) -> tuple[Tensor, ...]:
        """Call the token loop, in the dtype of the arguments."""
        return self._results(getattr(reference, self.loop)(**arguments))

    def _results(self, returned: Any) -> tuple[Tensor, ...]:
        results = returned if isinstance(returned, tuple) else (returned,)
        return tuple(results[: len(self.outputs)])


def _delta(rule: str, *, gate: str | None = None, beta: str | None = None) -> ArgumentMaker:
    def arguments(shape: Shape, dtype: torch.dtype, seed: int) -> Arguments:
        drawn = inputs.draw("random", rule, shape, state="normal", gate=gate, beta=beta, dtype=dtype, seed=seed)
        return {**drawn, "output_final_state": True}

    return arguments


def _gla(shape: Shape, dtype: torch.dtype, seed: int) -> Arguments:
    drawn = inputs.draw("random", "gla", shape, state="normal", dtype=dtype, seed=seed)
    return {**drawn, "output_final_state": True}


def _product(shape: Shape, dtype: torch.dtype, seed: int) -> Arguments:
    """Two updates of a token: k, v and beta of 2 T tokens, q and g of T of them."""
    longer = replace(shape, T=2 * shape.T)
    drawn = inputs.draw("random", "gated_delta_rule", longer, state="normal", dtype=dtype, seed=seed)
    for name in ("q", "g"):
        drawn[name] = drawn[name][:, : shape.T].contiguous()
    return {**drawn, "num_householder": 2, "output_final_state": True}


def _ttt(shape: Shape, dtype: torch.dtype, seed: int, *, states: bool) -> Arguments:
    square = replace(shape, V=shape.K)
    drawn = inputs.draw("random", "ttt_linear", square, state="normal" if states else "none", dtype=dtype, seed=seed)
    return {**drawn, "output_final_state": True} if states else drawn


def _path(shape: Shape, dtype: torch.dtype, seed: int, *, gate: bool) -> Arguments:
    """Arguments of PaTH attention with HV query heads over H heads of keys."""
    wide = torch.promote_types(dtype, torch.float32)
    heads = _tokens(shape, shape.H)
    q, k, v, w, beta, g = _normal(
        seed,
        torch.float64,
        _tokens(shape, shape.HV, shape.K),
        (*heads, shape.K),
        (*heads, shape.V),
        (*heads, shape.K),
        heads,
        _tokens(shape, shape.HV),
    )
    drawn = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    drawn |= {"w": torch.nn.functional.normalize(w, dim=-1).to(wide), "beta": 2 * torch.sigmoid(beta).to(wide)}
    return drawn | ({"g": torch.nn.functional.logsigmoid(g + 2).to(wide)} if gate else {})


def _conv(shape: Shape, dtype: torch.dtype, seed: int) -> Arguments:
    D, W = shape.H * shape.K, 4
    x, weight, bias, residual, state = _normal(
        seed, dtype, _tokens(shape, D), (D, W), (D,), _tokens(shape, D), (shape.B, D, W - 1)
    )
    drawn = {"x": x, "weight": weight, "bias": bias, "residual": residual, "initial_state": state}
    return {**drawn, "activation": "silu", "output_final_state": True}


def _gated_norm(shape: Shape, dtype: torch.dtype, seed: int) -> Arguments:
    rows = _tokens(shape, shape.HV, shape.V)
    return dict(zip(("x", "g", "weight", "bias"), _normal(seed, dtype, rows, rows, (shape.V,), (shape.V,))))


def _rows(shape: Shape, dtype: torch.dtype, seed: int) -> Arguments:
    return {"x": _normal(seed, dtype, _tokens(shape, shape.H, shape.K))[0]}


def _gate(rule: str, gate: str) -> ArgumentMaker:
    def arguments(shape: Shape, dtype: torch.dtype, seed: int) -> Arguments:
        drawn = inputs.draw("random", rule, shape, gate=gate, dtype=dtype, seed=seed)
        return {name: drawn[name] for name in ("g", "A_log", "dt_bias", "lower_bound") if name in drawn}

    return arguments


def _keys(shape: Shape, dtype: torch.dtype, seed: int) -> Arguments:
    drawn = inputs.draw("random", "kda", shape, gate="weak", dtype=dtype, seed=seed)
    return {name: drawn[name] for name in ("k", "beta", "g")} | {"chunk_size": 64}


def _triangle(shape: Shape, dtype: torch.dtype, seed: int) -> Arguments:
    """Triangular matrix of correlated keys: its powers grow quickly, but its inverse is small."""
    drawn = inputs.draw("near-identical", "kda", shape, seed=seed, dtype=torch.float64)
    return {"A": reference.chunk_scaled_dot_kkt(drawn["k"], drawn["beta"], drawn["g"], chunk_size=64).to(dtype)}


def _tokens(shape: Shape, *rest: int) -> tuple[int, ...]:
    return (shape.B, shape.T, *rest)


def _normal(seed: int, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def _spec(name: str, arguments: ArgumentMaker, outputs: tuple[str, ...] = ("y",), **options: Any) -> OperatorSpec:
    """Entry of an operator whose token loop has its name without the form."""
    operator = name.partition(",")[0]
    loop = operator.removeprefix("chunk_").removeprefix("fused_").removeprefix("recurrent_")
    return OperatorSpec(name, operator, loop, arguments, outputs, **options)


_OUT, _TTT_OUT = ("o", "state"), ("o", "state", "state_bias")
_INSIDE = {"gate": "model", "beta": "logits"}

_SPECS = (
    _spec("chunk_delta_rule", _delta("delta_rule"), _OUT),
    _spec("chunk_gated_delta_rule", _delta("gated_delta_rule"), _OUT),
    _spec("chunk_gated_delta_rule, gate inside", _delta("gated_delta_rule", **_INSIDE), _OUT),
    _spec("chunk_kda", _delta("kda"), _OUT),
    _spec("chunk_kda, gate inside", _delta("kda", **_INSIDE), _OUT),
    _spec("chunk_kda, bounded gate", _delta("kda", gate="model bounded"), _OUT),
    _spec("chunk_gated_delta_product", _product, _OUT),
    _spec("chunk_gla", _gla, _OUT),
    _spec("chunk_ttt_linear", partial(_ttt, states=True), _TTT_OUT, family="ttt"),
    _spec("fused_recurrent_delta_rule", _delta("delta_rule"), _OUT),
    _spec("fused_recurrent_gated_delta_rule", _delta("gated_delta_rule", gate="model"), _OUT),
    _spec("fused_recurrent_kda", _delta("kda", gate="model"), _OUT),
    _spec("fused_recurrent_gated_delta_product", _product, _OUT),
    _spec("fused_recurrent_gla", _gla, _OUT),
    _spec("fused_recurrent_ttt_linear", partial(_ttt, states=False), ("o",), family="ttt", kernels=False),
    _spec("chunk_dplr_delta_rule", _delta("dplr_delta_rule", gate="weak"), _OUT),
    _spec("chunk_iplr_delta_rule", _delta("iplr_delta_rule"), _OUT),
    _spec("chunk_rwkv7", _delta("rwkv7", gate="weak"), _OUT),
    _spec("chunk_gdn2", _delta("gdn2", gate="model"), _OUT),
    _spec("chunk_comba", _delta("comba", gate="weak"), _OUT),
    _spec("fused_recurrent_dplr_delta_rule", _delta("dplr_delta_rule", gate="any"), _OUT),
    _spec("fused_recurrent_iplr_delta_rule", _delta("iplr_delta_rule"), _OUT),
    _spec("fused_recurrent_rwkv7", _delta("rwkv7", gate="any"), _OUT),
    OperatorSpec(
        "fused_mul_recurrent_rwkv7",
        "fused_mul_recurrent_rwkv7",
        "mul_rwkv7",
        _delta("mul_rwkv7", gate="weak"),
        _OUT,
    ),
    _spec("fused_recurrent_gdn2", _delta("gdn2", gate="model bounded"), _OUT),
    _spec("fused_recurrent_comba", _delta("comba", gate="any"), _OUT),
    OperatorSpec(
        "parallel_path_attn",
        "parallel_path_attn",
        "path_attention",
        partial(_path, gate=False),
        ("o",),
    ),
    OperatorSpec(
        "parallel_path_attn, forget gate",
        "parallel_path_attn",
        "path_attention",
        partial(_path, gate=True),
        ("o",),
    ),
    _spec("solve_tril", _triangle, backward=False),
    OperatorSpec("chunk_scaled_dot_kkt", "chunk_scaled_dot_kkt", "chunk_scaled_dot_kkt", _keys, backward=False),
    _spec("causal_conv1d", _conv, ("y", "state")),
    _spec("rms_norm_gated", _gated_norm),
    _spec("l2norm", _rows),
    _spec("fused_gdn_gate", _gate("gated_delta_rule", "model")),
    _spec("fused_kda_gate", _gate("kda", "model bounded")),
    _spec("fused_beta_sigmoid", _rows),
)
OPERATOR_SPECS = {spec.name: spec for spec in _SPECS}
"""Name -> entry."""


def measured(
    call: Callable[[Arguments], tuple[Tensor, ...]],
    arguments: Arguments,
    names: tuple[str, ...],
    *,
    backward: bool = True,
    seed: int = 0,
    fed: Named | None = None,
    copy: bool = True,
) -> Named:
    """Outputs of a call, and the gradients of all its floating arguments, by name.

    Args:
        call: Maps the arguments to a tuple of tensors.
        arguments: Keyword arguments; not written to.
        names: Names of the outputs.
        backward: Whether to compute gradients.
        seed: Seed of the output gradients, which are the same in every dtype up to rounding.
        fed: Output name -> its gradient; None draws them.
        copy: Whether the call gets contiguous copies; otherwise it gets the tensors themselves, with their strides.
    """
    leaves = {
        name: (value.detach().clone() if copy else value.detach()).requires_grad_(backward)
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    outputs = dict(zip(names, call({**arguments, **leaves}), strict=True))
    found = {name: output.detach() for name, output in outputs.items()}
    if backward:
        if fed is None:
            fed = incoming(found, seed)
        gradients = torch.autograd.grad(
            list(outputs.values()), list(leaves.values()), [fed[name] for name in names], materialize_grads=True
        )
        found |= {GRADIENT_OF.get(name, f"d{name}"): gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return found


def incoming(outputs: Named, seed: int) -> Named:
    """Draw a gradient for each output, never parallel to other draws from `seed`."""
    return {name: inputs.incoming(output, FED + seed + i) for i, (name, output) in enumerate(outputs.items())}


def widened(arguments: Arguments) -> Arguments:
    """The arguments with every floating tensor in float64, without `state_dtype`."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
        if name != "state_dtype"
    }


def verdicts(spec: OperatorSpec, arguments: Arguments, got: Named, seed: int = 0) -> list[error.Verdict]:
    """One verdict per output and gradient in `got`.

    The eager backend computes 16-bit inputs in float32 and rounds once, so a tensor's dtype sets its limit. In float64
    and float32 the limit is the absolute target. In 16 bits the yardstick is the token loop in that dtype, which rounds
    where every form must. The absolute target applies as well if there is one.

    Args:
        spec: Operator that was called.
        arguments: Arguments of the call.
        got: Result of `measured` for them.
        seed: Seed given to `measured`.
    """
    fed = incoming({name: got[name] for name in spec.outputs}, seed)
    exact = {name: x.double() for name, x in fed.items()}

    def loop(drawn: Arguments, fed: Named) -> Named:
        return measured(spec.truth, drawn, spec.outputs, backward=spec.backward, fed=fed)

    truth = loop(widened(arguments), exact)
    yardstick = loop(arguments, fed) if any(x.dtype in NARROW for x in got.values()) else {}
    return [
        error.judge(
            x,
            truth[name],
            yardstick[name] if x.dtype in NARROW else None,
            name=name,
            target=bound(name, x.dtype, spec.family),
            per_token=PER_TOKEN.get(name) == x.ndim,
        )
        for name, x in got.items()
    ]


def bound(name: str, dtype: torch.dtype, family: str = "random") -> float | None:
    """Absolute target of a tensor by its name. Names without a target use that of o, and gradients that of dq."""
    if name in targets.OUTPUTS or name in targets.GRADIENTS:
        return targets.target(name, dtype, family)
    return None if dtype in NARROW else targets.target("dq" if name.startswith("d") else "o", dtype, family)


def judged(
    spec: OperatorSpec, shape: Shape, dtype: torch.dtype, seed: int = 0, device: torch.device = HOST
) -> list[error.Verdict]:
    """Verdicts on one call of the operator on a device, against the reference on the CPU.

    Inputs and output gradients are drawn on the CPU, so they are the same for every device.
    """
    arguments = spec.arguments(shape, dtype, seed)
    call = partial(spec.ours_on, device)
    got = measured(call, arguments, spec.outputs, backward=spec.backward, seed=seed)
    return verdicts(spec, arguments, got, seed)
