"""The verdicts on a `Trial`: drawn, run on kernels, and judged by the eager backend in float64.

`verdicts` compares results and gradients with those of the eager backend on the CPU, by the rules of
`wyfold.reference.error`. The whole operator is compared, not one launch at a time: between two launches there are no
results that the eager backend has too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any, cast

import torch
from torch import Tensor

from wyfold.kernels.trial import Trial

FEW = 64
"""Number of elements below which an error varies by chance: only the absolute target applies."""


DRAWS, BY_CHANCE = 3, 2.0
"""Most draws of a trial that fails by little, and the factor over a limit that is little."""


DRAW = 1000
"""Seeds of a draw."""


NARROW = (torch.bfloat16, torch.float16)


HOST = torch.device("cpu")


def verdicts(trial: Trial, device: torch.device) -> list[Any]:
    """Verdicts of `reference.error` on every result and gradient of a trial.

    The error of a gradient that sums over few heads varies by a third from draw to draw. So a trial that fails by less
    than a factor of `BY_CHANCE` is drawn again, and fails if all of `DRAWS` draws fail.
    """
    found = _verdicts(trial._replace(draw=0), device)
    for draw in range(1, DRAWS):
        failed = [verdict for verdict in found if not verdict.passed]
        if not failed or not all(map(_by_chance, failed)):
            break
        found = _verdicts(trial._replace(draw=draw), device)
    return found


def _by_chance(verdict: Any) -> bool:
    """Whether a failed verdict is over its limits by little. Results that are not finite are not."""
    pairs = zip(astuple(verdict.measured), astuple(verdict.limits), strict=True)
    return verdict.reason.startswith("over in ") and all(error <= BY_CHANCE * limit for error, limit in pairs)


def _verdicts(trial: Trial, device: torch.device) -> list[Any]:
    """Verdicts on one draw."""
    from wyfold.reference import error

    drawn = _arguments(trial)
    got = _call(trial, trial.values, drawn, device, {})
    eager = _eager_values(trial)
    fed = {name: x for name, x in got.items() if name.startswith("fed ")}
    exact_fed = {name: x.double() for name, x in fed.items()}
    truth = _call(trial, _in_float64(eager), [_in_float64(x) for x in drawn], HOST, exact_fed)
    work = next(x.dtype for x in trial.samples if x is not None)
    yardstick: dict[str, Tensor] = {}
    if work in NARROW or any(x.dtype in NARROW for x in got.values()):
        yardstick = _yardstick(trial, eager, drawn, fed, exact_fed)
    found = []
    for name, x in got.items():
        if name.startswith("fed "):
            continue
        dtype = x.dtype if trial.rounding == "once" else work
        target = _target(trial, name, dtype)
        allowed = yardstick.get(name) if dtype in NARROW else None
        if allowed is None:
            target = target or _target(trial, "dq" if name.startswith("d") else "o", dtype)
        elif x.numel() < FEW and target is not None:
            allowed = None
        else:
            target = None
        per_token = name in ("dbeta", "dg", "deta", "deta_col") and x.ndim == 3
        found.append(error.judge(x, truth[name], allowed, name=name, target=target, per_token=per_token))
    return found


def _target(trial: Trial, name: str, dtype: torch.dtype) -> float | None:
    """Absolute limit of a tensor; None in 16 bits for tensors that have none."""
    from wyfold.reference import targets

    family = "ttt" if trial.operator == "ttt_fwd" else "random"
    name = _SAME_TARGET.get(name, name)
    if name in targets.OUTPUTS or name in targets.GRADIENTS:
        found: float | None = targets.target(name, dtype, family)
        return found
    return None if dtype in NARROW else targets.target("dq" if name.startswith("d") else "o", dtype, family)


_SAME_TARGET = {"dinitial_state": "dh0"} | dict.fromkeys(("states", "pool", "checkpoints"), "state")
"""Tensor -> the tensor whose target it has."""


def _eager_values(trial: Trial) -> tuple[Any, ...]:
    """Values of the eager call: another backend, and sequences are not cut into segments."""
    names = _value_names(trial)
    whole = {"backend": "eager", "segment_chunks": 0, "segments": 1}
    return tuple([whole.get(name, value) for name, value in zip(names, trial.values, strict=True)])


def _schema(trial: Trial) -> Any:
    return getattr(torch.ops.wyfold, trial.operator).default._schema.arguments


def _value_names(trial: Trial) -> list[str]:
    return [argument.name for argument in _schema(trial)[len(trial.samples) :]]


def _in_float64(x: Any) -> Any:
    """A floating tensor or dtype in float64, also inside a tuple; anything else unchanged."""
    if isinstance(x, tuple):
        return tuple([_in_float64(y) for y in x])
    if isinstance(x, torch.dtype):
        return torch.float64 if x.is_floating_point else x
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _call(
    trial: Trial, values: tuple[Any, ...], drawn: list[Tensor | None], device: torch.device, fed: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Results and gradients of one call by name, on the CPU.

    Args:
        trial: The check.
        values: Arguments that are no tensors.
        drawn: Tensors on the CPU; not written to.
        device: Where the call runs.
        fed: "fed " and the name of a result -> its gradient. Empty: they are drawn, and are part of the results.
    """
    from wyfold.reference import inputs

    operator = getattr(torch.ops.wyfold, trial.operator).default
    arguments = _schema(trial)[: len(trial.samples)]
    moved = [None if x is None else x.to(device, copy=True) for x in drawn]
    written = {
        a.name: x for a, x in zip(arguments, moved, strict=True) if a.alias_info is not None and a.alias_info.is_write
    }
    leaves = {}
    for argument, x in zip(arguments, moved, strict=True):
        if trial.gradients and x is not None and x.is_floating_point() and argument.name not in written:
            leaves[argument.name] = x.requires_grad_()
    with torch.set_grad_enabled(trial.gradients):
        returned = operator(*moved, *values)
    returned = (returned,) if isinstance(returned, Tensor) else () if returned is None else tuple(returned)
    # A result that was not asked for is None, or has no elements.
    results = {name: x for name, x in zip(trial.results, returned) if x is not None and x.numel()}
    found = {name: x.detach() for name, x in (results | written).items() if x is not None and x.is_floating_point()}
    if leaves:
        into = {name: x for name, x in results.items() if x.requires_grad}
        for seed, (name, x) in enumerate(into.items(), DRAW * trial.draw + len(arguments)):
            found[f"fed {name}"] = fed[f"fed {name}"] if fed else inputs.incoming(x.detach().cpu(), seed)
        gradients = torch.autograd.grad(
            list(into.values()),
            list(leaves.values()),
            [found[f"fed {name}"].to(device) for name in into],
            materialize_grads=True,
        )
        found |= {f"d{name}": dx for name, dx in zip(leaves, gradients, strict=True)}
    return {name: x.cpu() for name, x in found.items()}


def _yardstick(
    trial: Trial,
    values: tuple[Any, ...],
    drawn: list[Tensor | None],
    fed: Mapping[str, Tensor],
    exact_fed: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Results with the error that 16 bits imply."""
    if trial.rounding == "once":
        return _call(trial, values, drawn, HOST, fed)
    if trial.rounding == "chunks":
        return _rounded_chunks(trial, drawn, fed)
    from wyfold.reference import error

    work = next(x.dtype for x in trial.samples if x is not None)
    moved = [
        error.half_ulp_away(x.to(work), seed) if x is not None and x.is_floating_point() else x
        for seed, x in enumerate(drawn)
    ]
    moved_fed = {name: error.half_ulp_away(x.to(work), 50 + n) for n, (name, x) in enumerate(exact_fed.items())}
    return _call(trial, _in_float64(values), moved, HOST, moved_fed)


def _rounded_chunks(trial: Trial, drawn: list[Tensor | None], fed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Results of `reference.rounded.chunked`, which rounds where 16-bit kernels of the delta family do."""
    from wyfold.reference.rounded import chunked

    t = dict(zip([argument.name for argument in _schema(trial)], drawn))
    o = dict(zip(_value_names(trial), trial.values, strict=True))
    leaves: dict[str, Any] = {
        name: x.detach().clone().requires_grad_(trial.gradients)
        for name, x in t.items()
        if x is not None and x.is_floating_point()
    }
    state, bias, pool, slots = leaves.get("initial_state"), leaves.get("dt_bias"), t.get("pool"), t.get("source")
    if pool is not None:
        slots = torch.arange(trial.sequences) if slots is None else slots[:, 0].long()
        state = pool[slots]
        if t["given"] is not None:
            state = state.where(t["given"][:, None, None, None], 0)
    if state is not None and o["state_v_first"]:
        state = state.mT
    if bias is not None and t["g"] is not None and t["g"].ndim == 4:
        bias = bias.view(t["g"].shape[2:])
    A_log = leaves.get("A_log")
    given = o["activation"] == "given"
    output, final = cast(Any, chunked)(
        *[leaves.get(name) for name in ("q", "k", "v", "g", "beta")],
        erases=o["erases"],
        chunk_size=o["chunk_size"],
        scale=o["scale"],
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=o["qk_l2norm"],
        use_gate_in_kernel=not given,
        A_log=None if A_log is None else A_log.flatten(),
        dt_bias=bias,
        safe_gate=o["clamp"] != 0.0,
        lower_bound=o["clamp"] or o["lower_bound"] or None,
        use_beta_sigmoid_in_kernel=o["beta_logit"],
        allow_neg_eigval=o["beta_most"] == 2.0,
        cu_seqlens=t["cu_seqlens"],
    )
    final = final.mT if o["state_v_first"] else final
    results = {"o": output, "state": final}
    if pool is not None:
        target = slots if t["target"] is None else t["target"].long()
        results = {"o": output, "pool": pool.index_copy(0, target, final.to(pool.dtype))}
    found = {name: x.detach() for name, x in results.items()}
    if trial.gradients:
        into = {name: x for name, x in results.items() if f"fed {name}" in fed}
        gradients = torch.autograd.grad(
            list(into.values()),
            list(leaves.values()),
            [fed[f"fed {name}"].to(x) for name, x in into.items()],
            materialize_grads=True,
        )
        found |= {f"d{name}": dx for name, dx in zip(leaves, gradients, strict=True)}
    return found


def _arguments(trial: Trial) -> list[Tensor | None]:
    """The drawn tensors of a trial, on the CPU. Each has its own seed, so one more tensor changes no other."""
    sizes = trial.sizes()
    found: list[Tensor | None] = []
    for seed, sample in enumerate(trial.samples):
        if sample is None:
            found.append(None)
            continue
        shape = (*[sizes[letter] for letter in sample.lead], *sample.rest)
        found.append(_draw(trial, sample.kind, shape, DRAW * trial.draw + seed).to(sample.dtype))
    return found


def _draw(trial: Trial, kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    if kind == "normal":
        return normal
    if kind == "unit":
        return torch.nn.functional.normalize(normal, dim=-1)
    if kind == "decay":
        return -0.1 * uniform
    if kind == "strength":
        return normal.sigmoid()
    if kind == "reflection":  # strengths near 0 and 2: others would shorten keys to nothing
        return 2 * (16 * normal).sigmoid()
    if kind == "step":
        return 0.1 * uniform
    if kind == "weight":
        return 1 + 0.1 * normal
    if kind == "map":  # a state, and a matrix that enlarges none
        return torch.cat([normal[..., : -shape[-2]], normal[..., -shape[-2] :] / shape[-2] ** 0.5], dim=-1)
    if kind == "triangle":  # rows of a chunk's strictly lower triangle, small enough to have a small inverse
        rows = torch.arange(shape[1])[:, None] % shape[-1]
        return 0.2 * normal * (torch.arange(shape[-1]) < rows)[:, None]
    if kind in ("A_log", "dt_bias"):
        from wyfold.reference import inputs

        parameters: tuple[Tensor, Tensor] = inputs.decay_parameters(uniform, uniform)
        return parameters[kind == "dt_bias"]
    return _draw_indices(trial, kind, shape, generator)


def _draw_indices(trial: Trial, kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if kind == "boundaries":
        return torch.tensor([0, *trial.lengths()]).cumsum(0)
    if kind in ("slots", "other slots"):  # distinct ones; "other slots" shares none with "slots"
        order = torch.randperm(trial.sizes()["S"], generator=torch.Generator().manual_seed(7))
        count = math.prod(shape)
        return order[count : 2 * count].view(shape) if kind == "other slots" else order[:count].view(shape)
    if kind == "rows":
        return torch.randperm(math.prod(shape), generator=generator).view(shape)
    if kind == "flags":
        return torch.arange(math.prod(shape)).view(shape) % 3 != 1
    if kind == "accepted":
        return torch.randint(1, trial.tokens + 1, shape, generator=generator)
    if kind == "position":
        return torch.randint(0, 16, shape, generator=generator)
    raise ValueError(f"self-check: a sample must have a known kind, got {kind!r}")
