"""Packed equals separate, bit for bit.

Outputs, states and per-token gradients of a sequence do not depend on the other sequences in the buffer, its position,
the order, or the contents of padding rows.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import wyfold
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

RULES = (
    pytest.param("delta_rule", marks=pytest.mark.release),
    "gated_delta_rule",
    "kda",
)  # no gate is a scalar gate left out
FORMS = ("chunk", "fused_recurrent")
PER_SEQUENCE = ("initial_state", "state", "dinitial_state")
SUMS = ("A_log", "dt_bias", "dA_log", "ddt_bias")  # sums over every sequence of the call

lengths_ = st.lists(st.sampled_from([0, 1, 2, 5, 15, 16, 17, 31, 33, 64, 65]), min_size=1, max_size=5)
heads_ = st.sampled_from([(1, 1), (1, 2), (2, 2), (2, 6)])
widths_ = st.sampled_from([(8, 8), (16, 64), (24, 16), (72, 8), (64, 64)])
dtypes_ = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
gates_ = st.sampled_from(["weak", "any", "alternating", "model"])


def sequence_of(found: dict[str, Any], n: int, begin: int, end: int) -> dict[str, Any]:
    """Results of sequence n, tokens begin to end - 1."""
    return {
        name: x
        if not isinstance(x, torch.Tensor) or name in SUMS
        else x[n : n + 1]
        if name in PER_SEQUENCE
        else x[:, begin:end]
        for name, x in found.items()
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
@given(lengths_, st.sampled_from([0, 3, 20]), heads_, widths_, dtypes_, gates_, st.integers(0, 99))
@example(
    [1, 16], 0, (1, 1), (16, 64), torch.bfloat16, "weak", 0
)  # regression: an outer product in a batch of one took another code path
@example([0, 48, 64], 0, (1, 1), (24, 64), torch.float16, "weak", 0)
def test_alone_among_others_and_reordered(
    results,
    rule: str,
    form: str,
    lengths: list[int],
    spare: int,
    heads,
    widths,
    dtype: torch.dtype,
    gate: str,
    seed: int,
):
    total, N = sum(lengths), len(lengths)
    shape = Shape(1, total + spare, *heads, *widths)
    a = inputs.draw("random", rule, shape, gate=gate, state="normal", sequences=N, dtype=dtype, seed=seed)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    op = getattr(wyfold, f"{form}_{rule}")
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": bool(seed % 2)}
    fed = {"o": inputs.incoming(a["v"], seed), "state": inputs.incoming(a["initial_state"], seed + 1)}
    for name, x in (a | {"o": fed["o"]}).items():  # padding rows hold NaN
        if isinstance(x, torch.Tensor) and name not in (*PER_SEQUENCE, *SUMS):
            x[:, total:] = torch.nan
    together = results(op, a, None, fed, cu_seqlens=cu, **options)
    for name, x in together.items():
        if name not in (*PER_SEQUENCE, *SUMS):
            assert torch.equal(x[:, total:], torch.zeros_like(x[:, total:])), name

    order = torch.randperm(N, generator=torch.Generator().manual_seed(seed)).tolist()
    bounds = list(pairwise(cu.tolist()))
    tokens = torch.cat([torch.arange(*bounds[n]) for n in order] + [torch.arange(total, total + spare)])

    def shuffled(found: dict[str, Any]) -> dict[str, Any]:
        return {
            name: x
            if not isinstance(x, torch.Tensor) or name in SUMS
            else x[order]
            if name in PER_SEQUENCE
            else x[:, tokens]
            for name, x in found.items()
        }

    moved_cu = torch.tensor([0, *(lengths[n] for n in order)]).cumsum(0)
    moved = results(op, shuffled(a), None, shuffled(fed), cu_seqlens=moved_cu, **options)
    for name, x in shuffled(together).items():
        assert name in SUMS or torch.equal(moved[name], x), name

    for n, (begin, end) in enumerate(bounds):
        alone = results(op, sequence_of(a, n, begin, end), None, sequence_of(fed, n, begin, end), **options)
        part = sequence_of(together, n, begin, end)
        for name, x in alone.items():
            assert name in SUMS or torch.equal(x, part[name]), (name, n)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_enough_work_for_two_threads(rule: str, form: str, results):
    """Sizes at which PyTorch splits a call among threads; the split must not depend on the other sequences."""
    torch.set_num_threads(2)
    lengths = [34, 1, 16, 18]
    a = inputs.draw("random", rule, Shape(1, 69, 2, 8, 64, 64), gate="model", state="normal", sequences=4)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    op = getattr(wyfold, f"{form}_{rule}")
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    together = results(op, a, None, fed, cu_seqlens=cu, output_final_state=True)
    for n, (begin, end) in enumerate(pairwise(cu.tolist())):
        alone = results(
            op, sequence_of(a, n, begin, end), None, sequence_of(fed, n, begin, end), output_final_state=True
        )
        part = sequence_of(together, n, begin, end)
        for name, x in alone.items():
            assert name in SUMS or torch.equal(x, part[name]), (name, n)
