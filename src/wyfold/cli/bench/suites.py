"""Suites of `bench`: operators at the heads, widths and gates of published models, one stored result each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from wyfold.cli.catalog import BOUNDED, MODEL, NO_GATE, RWKV7
from wyfold.reference.shapes import Shape

FORWARD, BOTH = ("fwd",), ("fwd", "fwdbwd")

GROUPS = ((16, 32), (16, 48), (16, 64), (8, 32), (4, 16), (2, 8))
"""Key heads and value heads of the Qwen GDN models, on one GPU and shared by several."""

PROMPTS = (1024, 2048, 4096, 8192, 16384)
"""Tokens of a prompt."""


@dataclass(frozen=True)
class SuiteRow:
    """One operator on one shape, with one gate.

    Attributes:
        op: As in `Case`.
        shape: Sizes.
        gate: As in `Case`.
        norm: "inside" or "outside", as in `Case`.
        modes: Directions that are timed.
    """

    op: str
    shape: Shape
    gate: str = "mid"
    norm: str = "inside"
    modes: tuple[str, ...] = BOTH


def _square(B: int, T: int, H: int, HV: int | None = None, K: int = 128, V: int | None = None) -> Shape:
    return Shape(B, T, H, HV or H, K, V or K)


def _table() -> Iterator[SuiteRow]:
    """Equal heads of 128 on a full GPU and one long sequence, with everything given: the cells of the older tables."""
    shapes = {
        "h96": _square(1, 8192, 96),
        "b4t4k": _square(4, 4096, 64),
        "t64kh8": _square(1, 65536, 8),
        "t32k": _square(1, 32768, 32),
        "h8": _square(1, 8192, 8),
    }
    for shape in (*shapes.values(), _square(1, 8192, 16, 32), _square(4, 2048, 16, 64)):
        yield SuiteRow("gdn", shape, norm="outside")
    for shape in (*shapes.values(), _square(1, 8192, 16, 32)):
        yield SuiteRow("kda", shape, norm="outside")
    for name in ("h96", "t64kh8"):
        yield SuiteRow("kda", shapes[name], gate="slow", norm="outside", modes=FORWARD)
    yield SuiteRow("delta_rule", shapes["h96"], gate=NO_GATE, norm="outside")


def _groups() -> Iterator[SuiteRow]:
    """Several value heads for each key head. Gates are given at two lengths, and softplus inside at the shorter."""
    for T in (8192, 32768):
        for H, HV in GROUPS:
            yield SuiteRow("gdn", _square(1, T, H, HV))
    for gate in ("mid", MODEL):
        yield SuiteRow("kda", _square(1, 8192, 16, 32), gate=gate)
    for H, HV in GROUPS:
        yield SuiteRow("gdn", _square(1, 8192, H, HV), gate=MODEL)


def _widths() -> Iterator[SuiteRow]:
    """Widths other than 128: OLMo-Hybrid's, those of a wide KDA, fla's default GDN layer, and 64."""
    yield SuiteRow("gdn", _square(1, 8192, 16, K=96, V=192), gate=MODEL)
    yield SuiteRow("kda", _square(1, 8192, 16, K=128, V=256), gate=MODEL)
    yield SuiteRow("gdn", _square(1, 8192, 6, K=256, V=512), gate=MODEL)
    for op in ("gdn", "kda", "delta_rule"):
        yield SuiteRow(op, _square(4, 4096, 32, K=64), gate=NO_GATE if op == "delta_rule" else "mid")


def _prompts() -> Iterator[SuiteRow]:
    """One prompt on the few heads that a GPU has when a model is spread over several."""
    for gate, op in product(("mid", "slow"), ("gdn", "kda")):
        for H, T in product((8, 4, 2), PROMPTS):
            yield SuiteRow(op, _square(1, T, H), gate=gate, modes=FORWARD)


def _gates() -> Iterator[SuiteRow]:
    """The same shapes with norm, gate and sigmoid given, and inside the operator: softplus and bounded."""
    for shape in (_square(1, 8192, 96), _square(1, 65536, 8)):
        for op, inside in (("kda", (MODEL, BOUNDED)), ("gdn", (MODEL,))):
            yield SuiteRow(op, shape, norm="outside")
            yield SuiteRow(op, shape)
            for gate in inside:
                yield SuiteRow(op, shape, gate=gate)


def _rules() -> Iterator[SuiteRow]:
    """Every further rule at 96 heads of 128 (PaTH: 32), then RWKV-7 and GLA at the widths of their models."""
    for op in ("gla", "gdp", "dplr", "gdn2"):
        yield SuiteRow(op, _square(1, 8192, 96), norm="outside")
    yield SuiteRow("rwkv7", _square(1, 8192, 96), gate=RWKV7, norm="outside")
    for gate in (NO_GATE, "mid"):
        yield SuiteRow("path", _square(1, 8192, 32), gate=gate, norm="outside")
    yield SuiteRow("comba", _square(1, 8192, 96), norm="outside")
    yield SuiteRow("rwkv7", _square(8, 4096, 32, K=64), gate=RWKV7, norm="outside")
    yield SuiteRow("gla", _square(4, 4096, 4, K=256, V=512), norm="outside")
    yield SuiteRow("iplr", _square(1, 8192, 96), gate=NO_GATE, norm="outside")
    yield SuiteRow("path", _square(1, 32768, 32), gate=NO_GATE, norm="outside")


def _layers() -> Iterator[SuiteRow]:
    """Whole layers of width H K: that of Qwen3-Next, a small one in a full batch, Kimi's, and fla's default GDN."""
    yield SuiteRow("gdn_layer", _square(1, 8192, 16, 32), gate=MODEL)
    yield SuiteRow("gdn_layer", _square(8, 4096, 8), gate=MODEL)
    yield SuiteRow("kda_layer", _square(1, 8192, 16), gate=MODEL)
    yield SuiteRow("gdn_layer", _square(1, 8192, 6, K=256, V=512), gate=MODEL)


SUITES = {
    "table": tuple(_table()),
    "groups": tuple(_groups()),
    "widths": tuple(_widths()),
    "prompts": tuple(_prompts()),
    "gates": tuple(_gates()),
    "rules": tuple(_rules()),
    "layers": tuple(_layers()),
}
"""Name in `--suite` -> its rows, in the order in which they run."""
