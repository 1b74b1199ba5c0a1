"""The layers for Megatron-LM, where megatron-core is installed."""

from tests.integrations.engines import run_script


def test_layers_have_the_outputs_and_gradients_of_ours():
    run_script("tests.integrations.megatron_layers", "GDN and KDA agree with wyfold.layers")
