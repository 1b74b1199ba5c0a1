"""The overrides for torchtitan, where torchtitan is installed."""

import sys

import pytest
from tests.integrations.engines import run_script

from wyfold.integrations import torchtitan


def test_overrides_have_the_outputs_and_gradients_of_our_layers():
    run_script("tests.integrations.torchtitan_layers", "GDN and KDA agree with wyfold.layers")


def test_importing_it_imports_no_torchtitan():
    assert callable(torchtitan.gated_delta_net) and "torchtitan" not in sys.modules


def test_a_bound_that_is_not_below_zero_is_refused_before_torchtitan_is_asked():
    with pytest.raises(ValueError, match=r"lower_bound must be below 0, got 0\.5"):
        torchtitan.kimi_delta_attention(None, lower_bound=0.5)
