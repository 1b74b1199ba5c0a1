"""`segment_fold` in Gluon, on the emulator, against the maps applied one by one."""

import pytest
import torch
from tests.emulator.cases import cases
from tests.emulator.compare import require_close
from tests.emulator.machine import Machine
from tests.kernels.test_segment_fold import drawn, folded

from wyfold.kernels.segment_fold import gluon as fold
from wyfold.runtime.chunk_layout import Segments
from wyfold.runtime.kernel_configs import Config

K, V = 128, 32
CONFIGS = [(8, 2), (8, 3), (16, 3)]
TWO_PARTS = 2.0**-16
CASES = cases([False, True], CONFIGS)


def computed(
    machine: Machine, config: tuple[int, int], S: torch.Tensor, M: torch.Tensor, segments: Segments, *, reverse: bool
) -> torch.Tensor:
    """States V-first and maps transposed, as `segment_summary` writes them."""
    S, M = S.clone().mT.contiguous().mT, M.mT.contiguous().mT
    with machine.installed(fold, Config(8, config[1], {"BV": config[0]})):
        fold.segment_fold(S, M, segments, reverse=reverse, dtype=torch.bfloat16)
    return S


def test_segment_fold(case):
    """Sequences of one to nine segments; spare borders keep their numbers."""
    reverse, config = case.values
    machine = Machine(*case.schedule)
    S, M, segments = drawn(K, V, torch.float32, torch.device("cpu"), most=9)
    truth = folded(S.clone(), M, segments, reverse)
    require_close(machine, TWO_PARTS, S=(computed(machine, config, S, M, segments, reverse=reverse), truth))


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_zero_maps(reverse: bool):
    """A sequence whose maps are all zeros is left as it is, unless a state to which they apply is not finite."""
    S, M, segments = drawn(K, V, torch.float32, torch.device("cpu"), most=17)
    start = int(segments.first[4]) - 4
    count = int(segments.first[5]) - 5 - start
    M[start : start + count] = -0.0
    S[start + 5, :, 2, 3] = -0.0
    edge = start if reverse else start + count - 1
    other = start + count - 1 if reverse else start
    for lost, border in ((None, None), (torch.nan, edge), (torch.inf, other), (torch.nan, start + 8)):
        machine, given = Machine(), S.clone()
        if border is not None:
            given[border, 1, 4, 0] = lost
        truth = folded(given.clone(), M, segments, reverse)
        got = computed(machine, CONFIGS[0], given, M, segments, reverse=reverse)
        assert torch.equal(got.isfinite(), truth.isfinite()), (lost, border)
        require_close(machine, TWO_PARTS, S=(got.nan_to_num(0, 0, 0), truth.nan_to_num(0, 0, 0)))
        # A negative zero survives only if nothing was added to it. No map applies to the last state.
        assert torch.signbit(got[start + 5, :, 2, 3]).tolist() == [True, border in (None, edge)]
