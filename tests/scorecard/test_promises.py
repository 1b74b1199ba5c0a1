"""Reliability scorecard: the promises of the library, the tests that keep them, and faults that those tests detect.

Numbers identify the promises; they are not consecutive. `make test ARGS="tests/scorecard tests/properties --draws 200"`
runs 200 random cases where the fixed ones are few.
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.properties import test_batch, test_causal, test_split

from wyfold.kernels.scan import eager as scan_stage

TESTS = Path(__file__).resolve().parents[1]


class Promise(NamedTuple):
    """One promise.

    Attributes:
        what: What holds.
        target: The number that counts as kept.
        tests: File below `tests/` -> test functions.
    """

    what: str
    target: str
    tests: dict[str, tuple[str, ...]]


TTT = "ops/test_ttt_linear.py"
GLA, PRODUCT, PATH = "ops/test_gla.py", "ops/test_delta_product.py", "ops/test_path_attention.py"
FAMILY = "properties/test_family.py"

PROMISES = {
    1: Promise(
        "all definitions of an operator agree",
        "relative error <= 1e-12 of outputs and 1e-10 of gradients, in float64",
        {
            "cli/test_verify.py": ("test_every_operator_and_gradient_is_near_the_recurrence",),
            "ops/test_delta_call.py": ("test_all_pairs_of_options",),
            "oracle/test_outside_oracle.py": ("test_random_calls_are_within_the_derived_bound",),
            TTT: ("test_recurrent_equals_chunk_for_every_split",),
        },
    ),
    2: Promise(
        "errors of indices and masks cannot hide",
        "0 bits",
        {"scorecard/test_exact_answers.py": ("test_answers_are_exact",)},
    ),
    5: Promise(
        "repeated and correlated keys stay accurate",
        "84 of 84 finite and within the float64 bounds and the float32 targets",
        {
            "ops/test_delta_rule.py": ("test_correlated_keys",),
            "scorecard/test_hard_keys.py": ("test_reflections_in_bfloat16",),
            TTT: ("test_correlated_and_vanishing_keys",),
        },
    ),
    6: Promise(
        "every gate from 0 to -inf is legal and accurate",
        "finite, within the rule of acceptance, gradients included",
        {
            "ops/test_gated_delta_rule.py": (
                "test_every_gate",
                "test_the_gradient_of_a_strong_gate_is_relatively_accurate",
            ),
            "ops/test_dplr.py": ("test_every_gate", "test_the_gate_of_a_reset_has_a_gradient_of_exactly_zero"),
            FAMILY: ("test_gates_packed_with_empty_and_short_sequences",),
            PATH: ("test_every_length", "test_packed"),
        },
    ),
    7: Promise(
        "float32 stays float32 where TF32 is allowed",
        "o <= 1e-5, gradients <= 1e-4",
        {
            "scorecard/test_float32.py": ("test_float32_stays_float32",),
            "runtime/test_torch_ops.py": ("test_float32_products_stay_float32",),
        },
    ),
    12: Promise(
        "a packed or batched sequence has the bits of the sequence alone",
        "0 bits",
        {
            "properties/test_packed.py": ("test_alone_among_others_and_reordered", "test_enough_work_for_two_threads"),
            "properties/test_batch.py": ("test_rows", "test_dense_is_packed"),
            FAMILY: ("test_packed_is_separate", "test_rows_and_heads_of_a_batch_and_repeats"),
            PATH: ("test_packed_equals_separate", "test_a_batch_is_its_rows"),
            TTT: ("test_packed_equals_separate_calls", "test_a_batch_row_equals_a_separate_call"),
        },
    ),
    13: Promise(
        "later tokens do not change earlier outputs",
        "0 bits",
        {
            "properties/test_causal.py": ("test_nothing_after_t_reaches_t",),
            TTT: ("test_causality",),
            **dict.fromkeys((FAMILY, PATH), ("test_nothing_after_t_reaches_t",)),
        },
    ),
    14: Promise(
        "a sequence split at a state has the bits of the whole",
        "0 bits at multiples of the chunk size",
        {
            "properties/test_split.py": ("test_every_cut", "test_gradients_cross_the_cut"),
            TTT: ("test_a_call_split_between_mini_batches_equals_one_call",),
            FAMILY: ("test_a_split_call",),
        },
    ),
    15: Promise(
        "strides do not matter",
        "0 bits, >= 12 kinds of strides on every argument and gradient",
        {
            "properties/test_strides.py": ("test_stride_kind", "test_expanded", "test_views_of_one_projection"),
            TTT: ("test_strides_change_no_bit", "test_an_expanded_argument_is_its_copy"),
            FAMILY: ("test_strides",),
            PATH: ("test_strides_and_repeats",),
        },
    ),
    17: Promise(
        "invalid arguments are named before any launch",
        ">= 60 kinds; argument, expected, got; 0 launches",
        {
            "scorecard/test_refusals.py": ("test_an_invalid_argument_is_named_before_any_launch",),
            "ops/test_bad_input.py": ("test_kind", "test_unknown_keywords_raise_type_error"),
            TTT: ("test_bad_input_is_refused",),
        },
    ),
    18: Promise(
        "every combination of options is accurate or refused",
        "every pair of options",
        {
            "ops/test_delta_call.py": ("test_all_pairs_of_options", "test_the_cases_cover_every_pair"),
            "ops/test_ttt_options.py": ("test_all_pairs_of_options", "test_every_pair_has_a_cell"),
            "oracle/test_outside_oracle.py": ("test_random_calls_are_within_the_derived_bound",),
        },
    ),
    19: Promise(
        "every length and every packing works",
        "accurate in float64; padding exactly 0; states of empty sequences copied",
        {
            "ops/test_delta_call.py": ("test_every_length", "test_every_packing"),
            TTT: ("test_every_length", "test_packed"),
            **dict.fromkeys((GLA, PRODUCT), ("test_every_length", "test_gates_packed_with_empty_and_short_sequences")),
            **dict.fromkeys(("ops/test_dplr.py", PATH), ("test_every_length", "test_packed")),
            FAMILY: ("test_every_length", "test_gates_packed_with_empty_and_short_sequences"),
        },
    ),
    26: Promise(
        "operators are operators of PyTorch",
        "opcheck passes; 0 graph breaks; <= 2 compiles for 10 lengths",
        {
            "scorecard/test_registered_operators.py": ("test_every_registered_operator_is_called", "test_opcheck"),
            "compile/test_fullgraph.py": ("test_lengths_forward_and_backward",),
            TTT: ("test_compiles_whole_and_once_for_all_lengths",),
        },
    ),
    29: Promise(
        "no call depends on earlier or concurrent calls",
        "0 bits",
        {
            "properties/test_repeat.py": (
                "test_in_eight_threads_at_once",
                "test_boundaries_edited_in_place_between_calls",
                "test_other_shapes_in_between",
            )
        },
    ),
    39: Promise(
        "import and first use are fast",
        "import <= 1 s over torch; a layer's first forward and backward <= 20 s; no CUDA start",
        {"scorecard/test_first_use.py": ("test_first_use_is_fast",)},
    ),
    40: Promise(
        "the package is clean",
        "torch only; byte-identical wheel; 0 pickle, eval, shell, network",
        {
            "test_package.py": (
                "test_wheel_is_the_same_bytes_when_built_elsewhere_and_later",
                "test_wheel_requires_torch_alone",
                "test_wheel_runs_without_optional_packages",
            ),
            "test_architecture.py": ("test_package_follows_rule",),
        },
    ),
}


@pytest.mark.parametrize("number", PROMISES)
def test_a_promise_has_its_tests(number: int):
    for file, names in PROMISES[number].tests.items():
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert set(names) <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, file


# --- faults ----------------------------------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, spoil) -> None:
    """Apply `spoil` to the outputs of the scan, in place."""
    usual = scan_stage.scan

    def planted(inputs, factors, S, table, scale, out, leaving):
        left = usual(inputs, factors, S, table, scale, out, leaving)
        spoil(out)
        return left

    monkeypatch.setattr(scan_stage, "scan", planted)


class Drawn:
    """Stands for hypothesis' `data`, and returns given values."""

    def __init__(self, *values):
        self.values = iter(values)

    def draw(self, strategy):
        return next(self.values)


def check_causality(results) -> None:
    test_causal.test_nothing_after_t_reaches_t.hypothesis.inner_test(
        results, "kda", "chunk 64", 40, Drawn(17, {"q", "v"}), torch.float32, "weak", (1, 1)
    )


def test_acausality_is_detected(monkeypatch, results):
    check_causality(results)
    plant(monkeypatch, lambda out: out[:, :-1].add_(out[:, 1:].clone(), alpha=1e-3))
    with pytest.raises(AssertionError):
        check_causality(results)


def test_a_leak_between_packed_sequences_is_detected(monkeypatch, results):
    plant(monkeypatch, lambda out: out.add_(out.mean(1, keepdim=True) * 1e-6))
    with pytest.raises(AssertionError):
        test_batch.test_dense_is_packed("gated_delta_rule", "chunk", 16, results)


def test_a_token_lost_at_a_cut_is_detected(monkeypatch):
    plant(monkeypatch, lambda out: out[:, 0].mul_(1 + 1e-6))
    with pytest.raises(AssertionError):
        test_split.test_every_cut("delta_rule", "chunk 64", torch.float32)
