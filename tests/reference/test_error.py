"""`judge`: correct results pass, planted errors fail, and each rule can be the one that fails."""

import math

import pytest
import torch
from torch import Tensor

from wyfold import reference
from wyfold.reference import error, targets
from wyfold.reference.error import judge, require
from wyfold.reference.inputs import draw
from wyfold.reference.shapes import Shape

BF16 = torch.bfloat16
T, V = 4096, 32


@pytest.fixture
def truth() -> Tensor:
    return torch.randn(1, T, 2, V, dtype=torch.float64)


def noisy(truth: Tensor, seed: int, size: float = 3e-3) -> Tensor:
    """A bf16 result of ordinary quality."""
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (truth + size * noise).to(BF16)


def test_the_measures():
    truth = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    x = truth + torch.tensor([[0.3, 0.4], [0.0, 0.1], [0.0, 0.0]])
    assert math.isclose(error.rms(x, truth), math.sqrt(0.26 / 50), rel_tol=1e-7)
    assert math.isclose(error.largest(x, truth), 0.4, rel_tol=1e-7)
    mean = 10 / 3
    assert math.isclose(error.row(x, truth), 0.1 / (mean / 10), rel_tol=1e-7)  # the zero row counts as a tenth of mean
    assert error.rms(truth, truth) == error.row(truth, truth) == error.largest(truth, truth) == 0
    zero = torch.zeros(2, 2, dtype=torch.float64)
    assert error.rms(zero, zero) == error.row(zero, zero) == 0
    assert error.rms(zero + 1e-9, zero) == error.row(zero + 1e-9, zero) == math.inf


def test_a_row_of_per_token_scalars_is_64_tokens_of_one_head():
    truth = torch.ones(1, 130, 2, dtype=torch.float64)
    x = truth.clone()
    x[0, 128, 1] = 1.5  # in the short last row: two tokens
    assert math.isclose(error.row(x, truth, per_token=True), 0.5 / math.sqrt(2))
    x[0, 70, 0] = 4.0
    assert math.isclose(error.row(x, truth, per_token=True), max(0.5 / math.sqrt(2), 3 / 8))


def test_of_several_yardsticks_the_largest_error_counts_in_each_measure(truth):
    """One yardstick has a bad row, the other a larger error everywhere; a result may have both, but no more."""
    row, everywhere = truth.clone(), truth + 1e-3 * torch.randn_like(truth)
    row[0, 5, 1] *= 1.05
    row, everywhere = row.float(), everywhere.float()
    assert error.rms(row, truth) < error.rms(everywhere, truth) and error.row(row, truth) > error.row(everywhere, truth)
    limits = [judge(row, truth, x, name="o").limits for x in (row, everywhere, [row, everywhere])]
    assert (limits[2].rms, limits[2].row) == (limits[1].rms, limits[0].row)
    assert judge(row, truth, [everywhere, row], name="o").passed
    assert judge(row, truth, everywhere, name="o").reason == "over in largest, row"
    assert not judge(truth + 3 * (row - truth), truth, [row, everywhere], name="o").passed
    with pytest.raises(ValueError, match="yardstick must be"):
        judge(row, truth, [everywhere, row[:, 1:]], name="o")
    with pytest.raises(ValueError, match="needs a yardstick or a target"):
        judge(row, truth, [], name="o")


def test_ulp_and_half_of_it():
    assert error.ulp(1.0, BF16) == 2**-7 and error.ulp(1.99, BF16) == 2**-7 and error.ulp(0.99, BF16) == 2**-8
    x = torch.tensor([1.0, -1.5, 3.0, 0.0, math.inf, 1e-3]).to(BF16)
    moved = error.half_ulp_away(x) - x.double()
    steps = [2**-8, 2**-8, 2**-7, 0.0, 2**-18]
    assert moved[[0, 1, 2, 3, 5]].abs().tolist() == steps and error.half_ulp_away(x)[4] == math.inf
    many = error.half_ulp_away(torch.ones(1000)) - 1
    assert 400 < (many > 0).sum() < 600


def test_a_result_as_good_as_the_yardstick_passes(truth):
    verdict = judge(noisy(truth, 1), truth, noisy(truth, 2), name="o", target=4e-3)
    assert verdict.passed and not verdict.waived
    require(verdict)


def planted_row(x: Tensor) -> Tensor:
    x[0, 1234, 1] = x[0, 1233, 1]
    return x


def planted_mask(x: Tensor) -> Tensor:
    x[:, ::64] = 0
    return x


def planted_element(x: Tensor) -> Tensor:
    x[0, 77, 0, 3] += 0.5
    return x


def planted_nan(x: Tensor) -> Tensor:
    x[0, 5, 0, 0] = math.nan
    return x


def planted_scale(x: Tensor) -> Tensor:
    return x * 1.03125


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (planted_row, "row"),
        (planted_mask, "rms, largest, row"),
        (planted_element, "largest, row"),
        (planted_nan, "not finite"),
        (planted_scale, "rms"),
    ],
)
def test_planted_errors_are_found(truth, plant, said):
    verdict = judge(plant(noisy(truth, 1)), truth, noisy(truth, 2), name="o")
    assert not verdict.passed and said in verdict.reason
    with pytest.raises(AssertionError, match=r"o +bfloat16"):
        require(verdict)


def test_noise_in_one_row_hides_from_rms(truth):
    """The reason for the row rule: one wrong row in 8,192 is far below any tolerance on the whole tensor."""
    got = noisy(truth, 1)
    got[0, 1234, 1] *= 1.1
    verdict = judge(got, truth, noisy(truth, 2), name="o", target=4e-3)
    assert verdict.measured.rms < verdict.limits.rms and verdict.measured.row > 5 * verdict.limits.row


def test_an_error_shared_with_the_yardstick_exceeds_the_target(truth):
    shared = planted_scale(noisy(truth, 1))
    assert judge(shared, truth, shared, name="o").passed
    assert judge(shared, truth, shared, name="o", target=4e-3).reason == "over in rms"


def test_a_nan_yardstick_allows_nothing(truth):
    verdict = judge(noisy(truth, 1), truth, planted_nan(noisy(truth, 2)), name="o")
    assert verdict.reason == "over in rms, largest, row"


def test_zero_must_be_zero():
    truth = torch.zeros(1, 3, 4, dtype=torch.float64)
    got = torch.zeros(1, 3, 4)
    assert judge(got, truth, got, name="dg").passed
    assert judge(got + 1e-38, truth, got, name="dg").passed
    assert judge(got + 1e-30, truth, got, name="dg").reason == "not zero where the truth is"
    assert judge(got + 1e-30, truth, got, name="dg", natural_scale=1e6).passed


def test_elements_out_of_range_are_not_judged():
    truth = torch.tensor([[1.0, 1e300], [2.0, math.nan]], dtype=torch.float64)
    got = torch.tensor([[1.0, math.inf], [2.0, 7.0]])
    assert judge(got, truth, name="o", target=1e-6).passed
    got[0, 0] = math.inf
    assert judge(got, truth, name="o", target=1e-6).reason == "not finite where the truth is"


def test_ill_posed_inputs_waive_all_but_finiteness(truth):
    wrong = noisy(truth, 1, size=0.2)
    assert not judge(wrong, truth, noisy(truth, 2), name="o").passed
    assert not judge(wrong, truth, noisy(truth, 2), name="o", moved=truth * 1.04).passed
    waived = judge(wrong, truth, noisy(truth, 2), name="o", moved=truth * 1.06)
    assert waived.passed and waived.waived and "waived" in str(waived)
    assert not judge(planted_nan(wrong), truth, noisy(truth, 2), name="o", moved=truth * 1.06).passed


def test_a_judgement_that_could_not_fail_is_refused(truth):
    with pytest.raises(ValueError, match="needs a yardstick or a target"):
        judge(truth, truth, name="o")
    with pytest.raises(ValueError, match=r"got must be \[1, 4096, 2, 32\], got \[4096, 2, 32\]"):
        judge(truth[0], truth, name="o", target=1e-3)
    with pytest.raises(ValueError, match="truth must be float64"):
        judge(truth, truth.float(), name="o", target=1e-3)


def test_empty_tensors_pass():
    empty = torch.zeros(1, 0, 2, dtype=torch.float64)
    assert judge(empty.float(), empty, empty.float(), name="dbeta", per_token=True).passed


def test_a_wrong_mask_in_the_recurrence_is_rejected_and_the_right_one_accepted():
    """End to end: float32 against float64, with one token's write dropped."""
    arguments = draw("random", "gated_delta_rule", Shape(T=200))
    wide = {n: x.double() for n, x in arguments.items()}
    truth, _ = reference.gated_delta_rule(**wide)
    right, _ = reference.gated_delta_rule(**arguments)
    require(judge(right, truth, name="o", target=targets.target("o", torch.float32)))
    dropped = arguments["beta"].clone()
    dropped[0, 100, 0] = 0
    wrong, _ = reference.gated_delta_rule(**arguments | {"beta": dropped})
    assert not judge(wrong, truth, right, name="o").passed


def test_targets():
    assert targets.target("o", torch.float64) == targets.target("state", torch.float64, "beta 2") == 1e-12
    assert targets.target("dg", torch.float64) == 1e-10 and targets.target("dg", torch.float32) == 1e-4
    assert targets.target("dg", torch.float16, "identical") == targets.target("dg", BF16, "identical") == 0.25
    assert targets.target("o", BF16, "rank 4") is None
    assert (
        targets.target("dg", torch.float32, "identical") == 3e-4
        and targets.target("dg", torch.float64, "identical") == 1e-10
    )
    with pytest.raises(KeyError, match="dz"):
        targets.target("dz", BF16)
