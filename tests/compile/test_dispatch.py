"""Each row of the dispatch table launches one kernel, whose tokens have the dtype and the sizes that the row names.

Launches of every public operator, with the keywords that select kernels, are recorded as on an H100. No GPU is needed.
"""

import contextlib
import importlib.util
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.compile import aot

import wyfold
from wyfold import serving
from wyfold.cli.operators import OPERATOR_SPECS
from wyfold.ops import serving_call
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import kernel_configs
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.unsupported import UnsupportedError

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

KEYWORDS: dict[str, tuple[Any, ...]] = {
    "chunk_size": (16, 32, 64),
    "use_qk_l2norm_in_kernel": (True, False),
    "return_intermediate_states": (True, False),
}
"""Keywords that select kernels, with their values."""

TOKENS = ("x_q", "x_v", "x_w", "x_o", "x_do")
"""Descriptors of tensors that Gluon kernels read or write as bfloat16."""


def variants(subject: str) -> Iterator[aot.Call]:
    """Calls of an operator with every value of its keywords, in the widths of most Gluon kernels."""
    given = inspect.signature(getattr(wyfold, subject.partition(",")[0])).parameters
    values = [[(name, value) for value in values] for name, values in KEYWORDS.items() if name in given]
    for width, options in itertools.product((64, 128), itertools.product(*values)):
        if ("return_intermediate_states", True) not in options or ("chunk_size", 64) in options:
            yield aot.Call(subject, K=width, V=width, options=options)


def gdn2(**given: Any) -> Callable[[], None]:
    """A call of GDN-2 in chunks of 64. given: Arguments in other dtypes; with `out`, a prefill."""
    a = inputs.draw("random", "gdn2", Shape(1, 128, 1, 1, 128, 128), gate="weak", dtype=torch.bfloat16)
    a |= {name: x.to(dtype) for name, dtype in given.items() if (x := a.get(name)) is not None} | {"backend": "triton"}

    def run() -> None:
        if "out" not in given:
            wyfold.chunk_gdn2(**a, chunk_size=64)
            return
        pool, slots, out = torch.zeros(3, 1, 128, 128), torch.tensor([1]), torch.empty(a["v"].shape, dtype=given["out"])
        with mock.patch.object(serving_call, "best_chunk_size", lambda *_, **__: 64):  # as on a GPU
            serving.prefill(**a, beta=None, pool=pool, state_indices=slots, rule="gdn2", state_v_first=False, out=out)

    return run


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, str], set[str]]]:
    """(kernel in the tables, words of the row) -> functions that were launched by the row, of each Gluon kernel."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    rows, search = [], kernel_configs.row

    def row(architecture: str, kernel: str, key: LaunchKey) -> str:
        words = search(architecture, kernel, key)
        rows.append((kernel, words))
        stage, _, language = kernel.partition(".")
        assert language == "triton" or kernel_configs.dispatched(architecture, stage, key), f"{stage}: {key}"
        return words

    def launched(kernel: Any, *_: Any, **options: Any) -> None:
        if rows and rows[-1][0].endswith(".gluon"):
            found[rows[-1]].add(kernel.fn.__name__)
            named, sizes = LaunchKey.parse(rows[-1][1]), options.get("SIZES")
            for name, size in (("K", named.K), ("BT", named.C)):
                assert getattr(sizes, name, size) == size, (rows[-1], sizes)
            read = {name: options[name].base.dtype for name in TOKENS if options.get(name) is not None}
            assert {*read.values()} <= {torch.bfloat16}, (rows[-1], read)
        rows.clear()  # a launch for which no row is searched adds up the results of this one

    monkeypatch.setattr(kernel_configs, "row", row)
    with aot.pretend_gpu("sm_90", launched):
        yield found


def test_every_operator_and_keyword(kernels: dict[tuple[str, str], set[str]]):
    """DPLR of K = 128 in chunks of 64 launched its kernel for chunks of 32 by the row of GDN-2."""
    for subject in OPERATOR_SPECS:
        for call in variants(subject):
            with contextlib.suppress(UnsupportedError):
                call.run()
    assert len(kernels) > 20
    assert all(len(names) == 1 for names in kernels.values()), kernels


@pytest.mark.parametrize("given", [{}, {"w": torch.float32}, {"out": torch.float32}, {"out": torch.bfloat16}], ids=str)
def test_dtypes_of_gdn2(given: dict[str, torch.dtype], kernels: dict[tuple[str, str], set[str]]):
    """`serving.prefill` with a float32 `out` launched the scan in Gluon, which stores bfloat16."""
    gdn2(**given)()
    assert any(kernel == "low_rank_scan.gluon" for kernel, _ in kernels) == (torch.float32 not in given.values())


@pytest.mark.parametrize("subject", OPERATOR_SPECS)
def test_explain_names_the_rows_of_every_call(subject: str):
    """Both search by the keys of one function. PaTH attention has fewer launches in 512 tokens, which were named."""
    for call, segments in itertools.product(variants(subject), (1, 9)):
        call = replace(call, segments=segments)
        with contextlib.suppress(UnsupportedError):
            assert aot.explained_rows(call, "sm_90") == aot.uncompiled(call, "sm_90").rows, call
