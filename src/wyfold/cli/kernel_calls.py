"""Calls of every operator that has kernels, for `wyfold verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wyfold
from wyfold import serving
from wyfold.cli.operators import OPERATOR_SPECS, OperatorSpec
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (64, 128)
PACKED = (0, 70, 70, 90)
SERVED = {"gated_delta_rule": "delta", "kda": "delta", "gla": "gla", "dplr_delta_rule": "dplr", "gdn2": "gdn2"}
"""Rules of `reference.inputs` -> those of serving calls."""


def kernel_calls(device: torch.device, *, quick: bool) -> dict[str, Callable[[], Any]]:
    """Calls by name: every operator with its gradients, dense and packed, and the serving operators.

    Args:
        device: Of the tensors.
        quick: One dtype and one width instead of all.
    """
    found: dict[str, Callable[[], Any]] = {}
    for dtype in DTYPES[: 1 if quick else None]:
        for width in WIDTHS[1 if quick else 0 :]:
            shape = Shape(1, PACKED[-1], 2, 4, width, width)
            end = f"{str(dtype).removeprefix('torch.')}, {width}"
            for name, spec in OPERATOR_SPECS.items():
                if spec.kernels:
                    found[f"{name}, {end}"] = partial(_call, spec, shape, dtype, device)
            for name in ("chunk_delta_rule", "chunk_gated_delta_rule", "chunk_kda"):
                found[f"{name}, packed, {end}"] = partial(
                    _call, OPERATOR_SPECS[name], shape, dtype, device, packed=True
                )
            found |= {f"{name}, {end}": call for name, call in _serving(width, dtype, device)}
    return found


def _call(spec: OperatorSpec, shape: Shape, dtype: torch.dtype, device: torch.device, *, packed: bool = False) -> None:
    arguments = spec.on(device, spec.arguments(shape, dtype, 0))
    if packed:
        arguments["cu_seqlens"] = torch.tensor(PACKED, device=device)
        arguments["initial_state"] = arguments["initial_state"].repeat(len(PACKED) - 1, 1, 1, 1)
    for x in arguments.values():
        if spec.backward and isinstance(x, Tensor) and x.is_floating_point():
            x.requires_grad_()
    getattr(wyfold, spec.operator)(**arguments, backend="triton")


def _serving(width: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls on pools: one token, drafted tokens and prompts of each rule; convolution; TTT-Linear."""
    rows, slots = 4, torch.arange(8, device=device)
    columns = slots.view(4, 2)
    for operator, rule in SERVED.items():
        for name, T, index in (("decode", 1, slots[:4]), ("verify", 2, columns), ("prefill", 90, slots[:4])):
            drawn = inputs.draw("random", operator, Shape(rows, T, 2, 4, width, width), dtype=dtype)
            drawn |= {"g": drawn.pop("gk")} if "gk" in drawn else {}
            given = {"beta": None} | {key: x.to(device) for key, x in drawn.items()}
            where = {"pool": torch.zeros(8, 4, width, width, device=device), "state_indices": index}
            more = {"rule": rule, "state_v_first": True, "backend": "triton"}
            yield f"{name} of {operator}", partial(getattr(serving, name), **given, **where, **more)
    x, weight = torch.ones(rows, 1, width, device=device, dtype=dtype), torch.ones(width, 4, device=device, dtype=dtype)
    cache = torch.zeros(8, width, 3, device=device, dtype=dtype)
    for name in ("conv1d_update", "conv1d_prefill"):
        yield name, partial(getattr(serving, name), x, cache, weight, state_indices=slots[:4], backend="triton")
    drawn = inputs.draw("random", "ttt_linear", Shape(rows, 1, 2, 2, width, width), dtype=dtype)
    S, c = (torch.zeros(8, 2, n, width, device=device) for n in (width, 1))
    states = wyfold.TTTState(S, c, S.clone(), c.clone(), torch.zeros(8, dtype=torch.int32, device=device))
    tokens = {name: x.to(device) for name, x in drawn.items()}
    yield "ttt_decode", partial(serving.ttt_decode, **tokens, pool=states, state_indices=slots[:4], backend="triton")
