"""Operators that share the chunk kernels in Gluon, whole and on the emulator, against their token loops in float64.

The rules differ in options and arguments of the same launches, under one key of the configurations. So a launch that
ignores an option is wrong for one rule alone, although the kernels are verified for the others.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.emulator.machine import Machine
from tests.emulator.test_gradients import sum_over_chunks

import wyfold
from wyfold import reference
from wyfold.autograd import delta, delta_chunk, kernel_call
from wyfold.autograd.kernel_call import KernelCall
from wyfold.kernels import table
from wyfold.kernels.gradients.gluon.channel import launch as channel_gradients
from wyfold.kernels.gradients.gluon.scalar import launch as scalar_gradients
from wyfold.kernels.prepare.gluon import channel, scalar
from wyfold.kernels.scan import gluon as scan
from wyfold.kernels.scan_bwd import gluon as scan_bwd
from wyfold.kernels.segment_fold import gluon as segment_fold
from wyfold.kernels.segment_summary.gluon import backward, forward
from wyfold.reference import inputs
from wyfold.reference.error import judge, require, rms
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target
from wyfold.runtime import chunk_layout, segment_rule
from wyfold.runtime.kernel_configs import Config

BF16 = torch.bfloat16
CONFIGS = (
    (channel.launch, Config(4, 1, {})),
    (scalar.launch, Config(4, 1, {})),
    (scan, Config(4, 2, {"BV": 128, "PARTS": 2, "OUT": 1})),
    (scan_bwd, Config(4, 2, {"BV": 128, "PARTS": 2, "OUT": 1})),
    (segment_fold, Config(8, 2, {"BV": 8})),
    (forward.launch, Config(4, 2, {"BV": 128, "PARTS": 2})),
    (backward.launch, Config(4, 2, {"BV": 128, "PARTS": 2})),
    (channel_gradients, Config(4, 1, {})),
    (scalar_gradients, Config(4, 1, {})),
)
WIDE = (
    (scalar.launch, Config(4, 1, {})),
    (scan, Config(4, 2, {"BV": 64, "PARTS": 1, "OUT": 1})),
    (scan_bwd, Config(4, 2, {"BV": 64, "PARTS": 1, "OUT": 1})),
    (scalar_gradients, Config(4, 3, {})),
)
"""Those for keys of 256 channels."""
RULES = {
    "delta rule": "delta_rule",
    "gated delta rule": "gated_delta_rule",
    "kda": "kda",
    "gla": "gla",
    "simple gla": "gla",
    "linear attention": "gla",
    "gated delta product": "gated_delta_product",
    "delta product of channels": "gated_delta_product",
}
EVERY_RUN = ("kda", "gla", "simple gla", "linear attention")


@contextlib.contextmanager
def on_the_emulator(configs: tuple[tuple[Any, Config], ...] = CONFIGS) -> Iterator[Machine]:
    """Run the launches that chunk operators make on Hopper; in place of Triton's kernels run their eager twins."""
    machine, stage = Machine(), KernelCall.stage

    def kernels(options: Any) -> Any:
        return options._replace(backend="triton")

    def in_triton(call: KernelCall, name: str) -> Any:
        return chunk_layout if name in ("chunk_grid", "segment_grid") else stage(call, name)

    chosen = SimpleNamespace(
        forward=lambda t, options, *more: delta_chunk.forward(t, kernels(options), *more),
        backward=lambda given: delta_chunk.backward(given._replace(options=kernels(given.options))),
        saved=lambda t, options: delta_chunk.saved(t, kernels(options)),
    )
    with contextlib.ExitStack() as stack:
        for patch in (
            mock.patch.object(delta, "implementation_for", lambda options: chosen),
            mock.patch.object(table, "selected_module", lambda stage, *_: table.kernel_module(stage, "gluon")),
            mock.patch.object(table, "selected_backend", lambda *_: "gluon"),
            mock.patch.object(KernelCall, "stage", in_triton),
            mock.patch.object(channel_gradients, "sum_over_chunks", sum_over_chunks),
            mock.patch.object(scalar_gradients, "sum_over_chunks", sum_over_chunks),
            *(machine.installed(*launch) for launch in configs),
        ):
            stack.enter_context(patch)
        yield machine


def drawn(name: str, K: int = 128, V: int = 128) -> dict[str, Any]:
    """Arguments of a call of 264 updates, four chunks and a part of one."""
    rule, T = RULES[name], 264
    product = rule == "gated_delta_product"
    of = {"gated delta product": "gated_delta_rule", "delta product of channels": "kda"}.get(name, rule)
    shape = Shape(1, T, 1, 2, K, V) if K == 128 else Shape(1, T, 2, 2, K, V)
    a = inputs.draw("random", of, shape, gate=None if rule == "delta_rule" else "weak", dtype=BF16, state="normal")
    if product:  # two updates of a token
        a |= {"q": a["q"][:, ::2].contiguous(), "g": a["g"][:, ::2].contiguous(), "num_householder": 2}
    if name == "simple gla":
        a["g"] = a["g"][..., 0].contiguous()
    if name == "linear attention":
        del a["g"]
    return a | {"output_final_state": True}


@pytest.mark.parametrize(
    ("name", "segments"),
    [
        pytest.param(name, segments, marks=() if segments > 1 and name in EVERY_RUN else pytest.mark.release)
        for name in RULES
        for segments in (1, 3)
    ],
)
def test_operators(name: str, segments: int, results):
    """In segments with other options than in whole."""
    a, rule = drawn(name), RULES[name]
    if segments > 1:
        a["scale"] = 0.3
        if rule != "gla":
            a["use_qk_l2norm_in_kernel"] = True
    compare(rule, a, segments, CONFIGS, results)


@pytest.mark.parametrize("name", ["delta rule", pytest.param("gated delta rule", marks=pytest.mark.release)])
def test_wide_heads(name: str, results):
    compare(RULES[name], drawn(name, 256, 256), 1, WIDE, results)


def compare(rule: str, a: dict[str, Any], segments: int, configs: tuple[tuple[Any, Config], ...], results: Any) -> None:
    """Compare a call on the emulator with its token loop in float64."""
    wide = {key: x.double() if isinstance(x, torch.Tensor) else x for key, x in a.items()}
    fed = {"o": inputs.incoming(a["v"][:, : a["q"].shape[1]], 1), "state": inputs.incoming(a["initial_state"], 2)}
    truth = results(getattr(reference, rule), wide, None, {key: x.double() for key, x in fed.items()})
    with on_the_emulator(configs) as machine, segment_rule.forced(segments):
        got = results(getattr(wyfold, f"chunk_{rule}"), a, None, fed, chunk_size=64)
    for name in ("summary", "fold"):
        assert (f"wyfold_segment_{name}_gluon" in machine.launches) == (segments > 1)
    assert {"wyfold_scan_gluon", "wyfold_scan_bwd_gluon"} <= {*machine.launches}
    names = {"dinitial_state": "dh0"}
    verdicts = [judge(got[key], x, name=key, target=target(names.get(key, key), BF16)) for key, x in truth.items()]
    require(*verdicts)


@pytest.mark.parametrize("rule", ["kda", "gated_delta_rule"])
def test_first_segments_beside_the_summaries(rule: str, monkeypatch):
    """Where segments are long, one launch scans those that begin a row, and one the others. No bit differs."""
    name = rule.replace("_", " ")
    a = {key: torch.cat([x, x.flip(1)]) for key, x in drawn(name).items() if isinstance(x, torch.Tensor)}
    found, scans = [], []
    for long in (3, 2):
        monkeypatch.setattr(kernel_call, "LONG", {"scalar": long, "channel": long})
        with on_the_emulator() as machine, segment_rule.forced(3), torch.no_grad():
            found.append(getattr(wyfold, f"chunk_{rule}")(**a, output_final_state=True, chunk_size=64))
        scans.append(machine.launches.count("wyfold_scan_gluon"))
    assert scans == [1, 2]
    for want, got in zip(*found, strict=True):
        assert torch.equal(want, got)


def test_exact_products_in_segments(results):
    """Without a gate or an erasure, the initial state's gradient is a sum of exact products, in any scale."""
    a = drawn("linear attention") | {"scale": 0.3}
    wide = {key: x.double() if isinstance(x, torch.Tensor) else x for key, x in a.items()}
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    truth = results(reference.gla, wide, None, {key: x.double() for key, x in fed.items()})
    with on_the_emulator() as machine, segment_rule.forced(3):
        got = results(wyfold.chunk_gla, a, None, fed, chunk_size=64)
    assert "wyfold_segment_summary_bwd_gluon" in machine.launches
    # `segment_fold` multiplies in parts of bfloat16; one rounding of do * scale is 4.6e-4.
    assert rms(got["dinitial_state"], truth["dinitial_state"]) < 1e-5
