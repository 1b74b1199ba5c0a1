"""The random calls of `test_outside_oracle.py` in float32 on compiled kernels."""

import pytest
import torch
from tests.oracle.calls import OPERATORS, compare, draw_call

WITHOUT_KERNELS = ("fused_recurrent_ttt_linear",)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("operator", [name for name in OPERATORS if name not in WITHOUT_KERNELS])
def test_random_calls_on_kernels_are_within_the_derived_bound(operator: str, request: pytest.FixtureRequest):
    beyond = []
    for seed in range(request.config.getoption("--draws") or 8):
        call = draw_call(operator, seed, "triton", (torch.float32,))
        beyond += [x for x in compare(call, device="cuda") if not x.error <= x.bound]
    assert not beyond, "\n".join(f"{x.call}\n  {x.name}: {x.error:.3e}, bound {x.bound:.3e}" for x in beyond)
