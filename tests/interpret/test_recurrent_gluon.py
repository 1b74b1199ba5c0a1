"""The Gluon kernel for one decoded token has the bits of the Triton kernel. Triton's interpreter runs both.

The interpreter does not support Gluon. But layouts decide where elements are stored and not their values. Without
layouts the kernel's remaining code is `tl`, and shared memory is a buffer that holds a tile.
"""

import importlib.util
import itertools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from wyfold import explain, serving
from wyfold.kernels import table
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import kernel_configs

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

RULES = ("delta_rule", "gated_delta_rule", "kda")
SLOTS = 7


class Shared:
    """Shared memory as a numpy array."""

    def __init__(self, dtype: Any, data: np.ndarray):
        self.dtype, self.data, self.shape = dtype, data, list(data.shape)

    def slice(self, first: int, rows: int) -> "Shared":
        return Shared(self.dtype, self.data[int(first) : int(first) + int(rows)])

    def load(self, layout: Any) -> Any:
        return tl.tensor(TensorHandle(self.data.copy(), self.dtype), tl.block_type(self.dtype, self.shape))

    def store(self, x: Any) -> None:
        assert x.dtype == self.dtype and list(x.shape) == self.shape
        self.data[...] = x.handle.data


class WithoutLayouts:
    """Stand-in for `gl` and `async_copy` that ignores layouts, for a program of `warps` warps."""

    def __init__(self, warps: int):
        self.warps = warps

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)

    def num_warps(self) -> int:
        return self.warps

    def arange(self, first: int, last: int, layout: Any) -> Any:
        return tl.arange(first, last)

    def convert_layout(self, x: Any, layout: Any) -> Any:
        return x

    def BlockedLayout(self, *_: Any) -> None:
        return None

    SliceLayout = SwizzledSharedLayout = BlockedLayout

    def allocate_shared_memory(self, dtype: Any, shape: Any, layout: Any, value: Any = None) -> Shared:
        width = {tl.bfloat16: np.uint16, tl.float32: np.float32}[dtype]
        if value is not None:
            return Shared(dtype, value.handle.data.copy())
        return Shared(dtype, np.full([int(n) for n in shape], 0x7FC0, width))  # NaN

    def copy_async(self, held: Shared, p: Any, mask: Any) -> None:
        held.store(tl.load(p, mask=mask, other=0.0))

    def commit_group(self) -> None:
        pass

    def wait_group(self, left: int) -> None:
        assert left == 0


def interpreted(kernel: Any, gl: WithoutLayouts, made: dict[Any, InterpretedFunction]) -> InterpretedFunction:
    """A Gluon function and its callees as interpreted Triton functions; `made` caches those already converted."""
    source = kernel.fn
    if source not in made:
        names = source.__globals__ | {"gl": gl, "async_copy": gl, "copy_async": gl.copy_async, "tl": tl}
        function = types.FunctionType(source.__code__, names, source.__name__, source.__defaults__)
        function.__module__ = source.__module__
        made[source] = InterpretedFunction(function)
        made[source].rewrite().__annotations__ = dict.fromkeys(source.__annotations__, tl.constexpr)
        names |= {name: interpreted(x, gl, made) for name, x in names.items() if isinstance(x, GluonJITFunction)}
    return made[source]


SHIPPED = (128, 4)
TILES = [(128, 2), (128, 8), (64, 1), (64, 2), (32, 1)]
"""Columns per program, and its warps."""


@pytest.fixture(params=[SHIPPED], ids=str)
def in_gluon(request: pytest.FixtureRequest, interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`in_gluon()` routes single tokens to the Gluon kernel from then on; it records how often that kernel ran."""
    from wyfold.kernels.recurrent import gluon

    columns, warps = request.param
    usual, launch_kernel = table.selected_backend, gluon.launch_kernel
    kernel = interpreted(gluon.wyfold_recurrent_gluon, WithoutLayouts(warps), {})
    found = types.SimpleNamespace(launches=0)

    def counted(_: Any, *arguments: Any, **fixed: Any) -> None:
        found.launches += 1
        launch_kernel(kernel, *arguments, **fixed)

    def language(stage: str, backend: str, key: kernel_configs.LaunchKey, device: torch.device) -> str:
        return "gluon" if stage == "recurrent" and key.alone else usual(stage, backend, key, device)

    def switch() -> types.SimpleNamespace:
        monkeypatch.setattr(gluon, "launch_kernel", counted)
        monkeypatch.setattr(table, "selected_backend", language)
        return found

    config = kernel_configs.Config(warps, 1, {"BV": columns})
    with kernel_configs.override_row("sm_90", "recurrent.gluon", "bf16 K128 V128 KV alone", config):
        yield switch


def drawn(rule: str, device: torch.device, **more: Any) -> dict[str, Any]:
    given = {"gate": None if rule == "delta_rule" else "model", "beta": "logits", "state": "none"} | more
    a = {"g": None} | inputs.draw("random", rule, Shape(5, 1, 1, 2, 128, 128), **given)
    a |= {"use_qk_l2norm_in_kernel": True, "backend": "triton", "state_v_first": False}
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in a.items()}


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "inside": ({}, {}),
    "ready-made": (
        {"gate": "weak", "beta": "sigmoid", "dtype": torch.bfloat16},
        {"use_qk_l2norm_in_kernel": False, "scale": -0.3},
    ),
    "raised gate": ({"gate": "any", "beta": "sigmoid"}, {"beta": None, "safe_gate": True, "lower_bound": -0.5}),
    "bounded gate": ({"gate": "model bounded"}, {}),
}
"""Drawn inputs and further options. float32 unless named, so that an output shows the last bit of its sum."""


@pytest.mark.parametrize("rule, name", [*itertools.product(RULES[1:], OPTIONS), ("delta_rule", "inside")])
def test_a_token_has_the_bits_of_the_triton_kernel(rule: str, name: str, in_gluon: Any, device: torch.device):
    """With rows without a slot, missing states, states written to other slots, and NaN in unused slots."""
    drawn_with, given = OPTIONS[name]
    a = drawn(rule, device, **drawn_with) | given
    before = torch.randn(SLOTS, 2, 128, 128, device=device).bfloat16()
    before[[2, 6]] = torch.nan
    a |= {"state_indices": torch.tensor([3, -1, 6, 0, 9]), "has_initial_state": torch.tensor([1, 1, 0, 1, 1]).bool()}
    a |= {"output_state_indices": torch.tensor([3, 1, 5, -1, 2])}
    expected, pool = before.clone(), before.clone()
    o = serving.decode(**a, pool=expected)
    found = in_gluon()
    assert torch.equal(serving.decode(**a, pool=pool), o) and found.launches == 1
    assert torch.equal(pool.view(torch.int16), expected.view(torch.int16))
    assert not torch.equal(pool[3], before[3]) and pool[5].isfinite().all() and o[3].any()


@pytest.mark.parametrize(
    "in_gluon",
    [SHIPPED, TILES[0], *(pytest.param(tile, marks=pytest.mark.release_if_interpreted) for tile in TILES[1:])],
    indirect=True,
    ids=str,
)
def test_strided_tokens_and_states(in_gluon: Any, device: torch.device):
    """A pool with gaps between its slots, and columns of a projection; without slot indices row n uses slot n."""
    a = drawn("kda", device)
    buffer = torch.randn(5, 1, 2, 3 * 128 + 1, device=device, dtype=a["v"].dtype)
    a |= {"v": buffer[..., 1:129], "q": buffer[:, :, :1, 129:257], "k": buffer[:, :, :1, 257:]}
    wide = torch.randn(SLOTS, 3, 128, 128, device=device).bfloat16()
    expected, pool = wide.clone()[:, 1:], wide.clone()[:, 1:]
    o = serving.decode(**a, pool=expected)
    found = in_gluon()
    assert torch.equal(serving.decode(**a, pool=pool), o) and found.launches == 1 and torch.equal(pool, expected)


def test_misaligned_states_use_triton(in_gluon: Any, device: torch.device):
    a = drawn("gated_delta_rule", device)
    buffer = torch.randn(2, 5 * 2 * 128 * 128 + 1, device=device).bfloat16()
    expected, pool = (x[1:].view(5, 2, 128, 128) for x in (buffer[0], buffer[0].clone()))
    o = serving.decode(**a, pool=expected)
    found = in_gluon()
    assert torch.equal(serving.decode(**a, pool=pool), o) and found.launches == 0 and torch.equal(pool, expected)


def test_explain_names_the_launch_that_is_made(in_gluon: Any, device: torch.device):
    """The pools differ in their alignment or in the gap between their slots."""
    a = drawn("gated_delta_rule", device)
    state = 2 * 128 * 128
    buffer = torch.zeros(5 * (state + 16) + 1, device=device, dtype=torch.bfloat16)
    found, steps = in_gluon(), (128 * 128, 128, 1)
    placed = {(state, 0): "gluon", (state, 1): "triton", (state, 8): "gluon"}
    placed |= {(state + 16, 0): "gluon", (state + 8, 0): "triton"}
    for (step, begin), language in placed.items():
        pool = buffer.as_strided((5, 2, 128, 128), (step, *steps), begin)
        plan, before = explain(serving.decode, **a, pool=pool), found.launches
        assert plan.forward == (f"recurrent (wyfold.kernels.recurrent.{language})",)
        serving.decode(**a, pool=pool)
        assert found.launches - before == (language == "gluon")
