"""`chunk_scaled_dot_kkt` on its kernel, against the row loop in float64, for every gate, grid, width and dtype.

Inputs are surrounded by NaN, and outputs are initialised with NaN.
"""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from wyfold import chunk_scaled_dot_kkt, reference
from wyfold.reference import error
from wyfold.reference.inputs import GATES
from wyfold.reference.targets import target

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (0, 17, 17, 82, 83, 147)


def drawn(T: int, gate: str, B: int = 1, H: int = 1, HV: int = 2, K: int = 24, dtype: torch.dtype = FP32):
    k = torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1).to(dtype)
    g = None if gate == "none" else -torch.rand(B, T, HV, *((K,) if gate == "channel" else ()))
    return k, torch.rand(B, T, HV), g


def judged(inputs: tuple[Tensor | None, ...], cu: Tensor | None, got: Tensor, **options) -> None:
    """float32 results have a target; the error of 16-bit ones may be that of the eager backend."""
    wide = (None if x is None else x.double() for x in inputs)
    truth = reference.chunk_scaled_dot_kkt(*wide, chunk_size=options["chunk_size"], cu_seqlens=cu)
    eager = chunk_scaled_dot_kkt(*inputs, cu_seqlens=cu, backend="eager", **options)
    wanted = {"target": target("o", FP32)} if got.dtype == FP32 else {"yardstick": eager}
    error.require(error.judge(got.cpu(), truth, **wanted, name="L"))
    # Decays become 0 below 2^-126 (channel gates below 2^-78), not at the same value everywhere. Entries that are zero
    # by definition are exactly zero.
    tiny, got = torch.finfo(FP32).tiny, got.cpu()
    least = 2.0**-77 if inputs[2] is not None and inputs[2].ndim == 4 else 2 * tiny
    nothing = got.abs() < tiny
    assert nothing[eager == 0].all() and not nothing[eager.abs() >= least].any()


@pytest.fixture
def to_device(guarded: Callable, device: torch.device) -> Callable:
    """Inputs on the device, between guards."""
    return lambda inputs: [None if x is None else guarded(x.to(device)) for x in inputs]


@pytest.mark.parametrize("gate", ["none", "scalar", "channel"])
@pytest.mark.parametrize(
    "C, T, H, HV, K, dtype",
    [
        (64, 70, 1, 2, 24, FP32),
        (32, 64, 2, 4, 40, BF16),
        (16, 33, 1, 3, 8, FP16),
        (64, 65, 1, 1, 136, BF16),
        (32, 40, 1, 2, 100, BF16),
        (16, 20, 1, 2, 3, FP32),
    ],
    ids=str,
)
def test_dense(gate: str, C: int, T: int, H: int, HV: int, K: int, dtype: torch.dtype, to_device: Callable):
    inputs = drawn(T, gate, 2, H, HV, K, dtype)
    got = chunk_scaled_dot_kkt(*to_device(inputs), chunk_size=C, backend="triton")
    assert got.dtype == FP32
    judged(inputs, None, got, chunk_size=C)


@pytest.mark.parametrize("gate", ["none", "scalar", "channel"])
@pytest.mark.parametrize("C, output_dtype", [(64, FP32), (32, BF16), (16, FP32)], ids=str)
def test_packed(gate: str, C: int, output_dtype: torch.dtype, to_device: Callable, device: torch.device):
    cu, options = torch.tensor(RAGGED), {"chunk_size": C, "output_dtype": output_dtype}
    inputs = drawn(RAGGED[-1] + 13, gate)
    past = tuple(x if x is None else x.clone() for x in inputs)
    for x in past:
        if x is not None:
            x[:, RAGGED[-1] :] = torch.nan
    got = chunk_scaled_dot_kkt(*to_device(past), cu_seqlens=cu.to(device), backend="triton", **options)
    judged(inputs, cu, got, **options)
    for start, end in itertools.pairwise(RAGGED):
        alone = (x if x is None else x[:, start:end] for x in inputs)
        assert torch.equal(chunk_scaled_dot_kkt(*to_device(alone), backend="triton", **options), got[:, start:end])


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("channels", [(), (24,)], ids=["scalar", "channel"])
def test_any_gate(kind: str, channels: tuple[int, ...], to_device: Callable):
    k, beta, _ = drawn(67, "none", dtype=BF16)
    g = GATES[kind]((1, 67, 2, *channels), torch.Generator().manual_seed(0)).float()
    got = chunk_scaled_dot_kkt(*to_device((k, beta, g)), chunk_size=64, backend="triton")
    judged((k, beta, g), None, got, chunk_size=64)


@pytest.mark.parametrize("kind", ["reset first", "reset one", "reset last"])
@pytest.mark.parametrize("channels", [(), (24,)], ids=["scalar", "channel"])
def test_a_strong_gate_adds_no_error_to_decays_between_other_rows(
    kind: str, channels: tuple[int, ...], to_device: Callable
):
    k, beta, _ = drawn(64, "none", dtype=BF16)
    g = GATES[kind]((1, 64, 2, *channels), torch.Generator().manual_seed(0)).float()
    got = chunk_scaled_dot_kkt(*to_device((k, beta, g)), backend="triton")
    truth = reference.chunk_scaled_dot_kkt(k.double(), beta.double(), g.double())
    # A product of exact rows, an exponential of a sum without the strong gate, and two factors.
    assert error.rms(got.cpu(), truth) <= 8 * torch.finfo(FP32).eps


STRONG = {
    "a reset in a sub-chunk": {5: -torch.inf, 37: -torch.inf},
    "two and a weak one": {5: -1e4, 21: -95.0, 22: -95.0, 40: -30.0},
    "all but every seventh": {i: -1e4 for i in range(64) if i % 7},
    "thirty everywhere": dict.fromkeys(range(64), -30.0),
    "just what an anchor reaches": {3: -48 * math.log(2), 9: -48 * math.log(2), 25: -96.1 * math.log(2)},
}


@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("kind", STRONG)
def test_strong_channel_gates_lose_no_digits(kind: str, C: int, to_device: Callable):
    k, beta, g = drawn(64, "channel")
    for token, gate in STRONG[kind].items():
        g[:, token, 0] = gate
        g[:, token, 1, ::3] = gate
    got = chunk_scaled_dot_kkt(*to_device((k, beta, g)), chunk_size=C, backend="triton")
    truth = reference.chunk_scaled_dot_kkt(k.double(), beta.double(), g.double(), chunk_size=C)
    for head in range(2):
        assert error.rms(got.cpu()[:, :, head], truth[:, :, head]) <= 8 * torch.finfo(FP32).eps


@pytest.mark.parametrize(
    "C, K, dtype",
    [
        *((C, 8, BF16) for C in (16, 32, 64)),
        *((C, 40, FP16) for C in (16, 32, 64)),
        pytest.param(16, 128, FP32, marks=pytest.mark.release_if_interpreted),
        (64, 128, FP32),
        pytest.param(32, 256, BF16, marks=pytest.mark.release_if_interpreted),
    ],
    ids=str,
)
def test_channels(K: int, dtype: torch.dtype, C: int, to_device: Callable):
    # A head of 256 channels takes as long as thirty of 8.
    k, beta, g = drawn(C + 6, "channel", 1, *((2, 4) if K < 128 else (1, 2)), K, dtype)
    strength = torch.tensor([0.0, 0.05, 1.0, 30.0, 1e4])[torch.randint(5, g.shape)]
    kinds = g / 16, torch.zeros_like(g), g * strength, torch.where(strength > 1, -torch.inf, g)
    for gates in kinds if K < 128 else kinds[2:]:
        got = chunk_scaled_dot_kkt(*to_device((k, beta, gates)), chunk_size=C, backend="triton")
        judged((k, beta, gates), None, got, chunk_size=C)


@pytest.mark.parametrize("gate", ["none", "scalar", "channel"])
@pytest.mark.parametrize("first", [3, 16, 21, 47])
def test_rows_do_not_depend_on_later_tokens(gate: str, first: int, to_device: Callable):
    """Nor on whether later tokens need more anchors."""
    inputs = drawn(64, gate, dtype=BF16)
    L = chunk_scaled_dot_kkt(*to_device(inputs), backend="triton")
    for strength in (0.0, 1.0, 200.0):
        later = [None if x is None else x.clone() for x in inputs]
        for x, new in zip(later, drawn(64, gate, dtype=BF16)):
            if x is not None:
                x[:, first:] = new[:, first:] * (strength if x is later[2] else 1.0)
        got = chunk_scaled_dot_kkt(*to_device(later), backend="triton")
        assert torch.equal(got[:, :first], L[:, :first]) and not torch.equal(got, L)


@pytest.mark.parametrize("gate, C", [("none", 16), ("scalar", 16), ("channel", 16), ("channel", 32), ("channel", 64)])
def test_what_is_not_finite_stays_in_its_chunk_and_below_the_diagonal(gate: str, C: int, to_device: Callable):
    """NaN also occurs wherever the row loop has it."""
    inputs = drawn(80, gate)
    L = chunk_scaled_dot_kkt(*to_device(inputs), chunk_size=C, backend="triton")
    chunk = slice(20 // C * C, 20 // C * C + C)
    for x in inputs:
        if x is None:
            continue
        broken = x.clone()
        broken[:, 20] = torch.nan
        changed = [broken if y is x else y for y in inputs]
        got = chunk_scaled_dot_kkt(*to_device(changed), chunk_size=C, backend="triton")
        truth = reference.chunk_scaled_dot_kkt(*(None if y is None else y.double() for y in changed), chunk_size=C)
        assert truth.isnan().any() and got.cpu()[truth.isnan()].isnan().all()
        assert torch.equal(got[:, : chunk.start], L[:, : chunk.start])
        assert torch.equal(got[:, chunk.stop :], L[:, chunk.stop :])
        row = torch.arange(80, device=got.device) % C
        assert (got.masked_fill((torch.arange(C, device=got.device) < row[:, None])[:, None], 0) == 0).all()


@pytest.mark.parametrize("C", [16, 32, 64])
def test_nothing_passes_a_reset_however_large_keys_are(C: int, to_device: Callable):
    k, beta, g = drawn(64, "channel")
    g[:, 6] = -torch.inf
    got = chunk_scaled_dot_kkt(*to_device((k * 1e15, beta, g)), chunk_size=C, backend="triton")
    assert not got[:, 6:C, :, :6].any() and got[:, 8].any()


@pytest.mark.parametrize("C", [16, 64])
@pytest.mark.parametrize("each", [-8.4e-5, -0.0846, -0.5, -5.0])
def test_equal_gates_are_as_exact_as_others(each: float, C: int, to_device: Callable):
    """With equal gates the rounding errors of all gates have one sign and add up."""
    k, beta, g = drawn(64, "channel", K=128, dtype=BF16)
    g.fill_(each)
    got = chunk_scaled_dot_kkt(*to_device((k, beta, g)), chunk_size=C, backend="triton")
    truth = reference.chunk_scaled_dot_kkt(k.double(), beta.double(), g.double(), chunk_size=C)
    assert error.rms(got.cpu(), truth) <= 8 * torch.finfo(FP32).eps


@pytest.mark.parametrize("gate", ["scalar", "channel"])
def test_strided_is_contiguous(gate: str, device: torch.device):
    k, beta, g = (x.to(device) for x in drawn(50, gate, 2, 2, 4))
    L = chunk_scaled_dot_kkt(k, beta, g, chunk_size=16, backend="triton")
    for axis in (2, -1):
        apart = [x.transpose(1, axis).contiguous().transpose(1, axis) for x in (k, beta, g)]
        assert torch.equal(chunk_scaled_dot_kkt(*apart, chunk_size=16, backend="triton"), L)
    shared = chunk_scaled_dot_kkt(k[:, :, :1].expand_as(k), beta, g, chunk_size=16, backend="triton")
    assert torch.equal(shared, chunk_scaled_dot_kkt(k[:, :, :1], beta, g, chunk_size=16, backend="triton"))


def test_repeats(device: torch.device):
    inputs = [None if x is None else x.to(device) for x in drawn(100, "scalar", K=64, dtype=BF16)]
    L = chunk_scaled_dot_kkt(*inputs, backend="triton")
    count = 3 if device.type == "cpu" else 100
    assert all(torch.equal(chunk_scaled_dot_kkt(*inputs, backend="triton"), L) for _ in range(count))
