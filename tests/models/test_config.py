"""The configuration of a decoder: pattern, JSON and errors."""

import dataclasses
import json

import pytest

from wyfold.models import DecoderConfig


def test_a_pattern_is_repeated_to_depth():
    config = DecoderConfig(pattern="kda*3 attention", num_layers=6)
    assert config.layers == ("kda", "kda", "kda", "attention", "kda", "kda")
    assert DecoderConfig(pattern="gdn", num_layers=2).layers == ("gated_delta_net",) * 2


def test_a_configuration_survives_json(config):
    again = DecoderConfig.from_json(config.to_json())
    assert again == config and again.layers == config.layers
    assert DecoderConfig.from_json(DecoderConfig().to_json()) == DecoderConfig()


def test_options_override_shared_fields(config):
    kda, attention = config.mixer("kda"), config.mixer("attention")
    assert (kda.lower_bound, kda.num_heads, attention.window) == (-5.0, 2, 6)
    config = DecoderConfig(options={"gdn": {"num_heads": 1, "num_v_heads": 6, "head_dim": 32, "conv_size": 2}})
    mixer = config.mixer("gated_delta_net")
    assert (mixer.num_heads, mixer.num_v_heads, mixer.head_dim, mixer.conv.weight.shape[1]) == (1, 6, 32, 2)
    assert config.mixer("kda").num_heads == 4


def test_a_configuration_owns_its_options():
    options = {"attention": {"window": 6}}
    config = DecoderConfig(options=options)
    options["attention"]["window"] = 7
    assert config.options == {"attention": {"window": 6}}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_heads = 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"hidden_size": 64.0}, "hidden_size must be an int, got float"),
        ({"num_layers": -1}, "num_layers must be at least 1, got -1"),
        ({"num_v_heads": 0}, "num_v_heads must be at least 1, got 0"),
        ({"mlp_size": "4x"}, "mlp_size must be an int, got str"),
        ({"tied": None}, "tied must be True or False, got None"),
        ({"norm_eps": float("nan")}, "norm_eps must be finite, got nan"),
        ({"pattern": ["kda"]}, "pattern must be a str, got list"),
        ({"pattern": " "}, "pattern must name at least one mixer, got ' '"),
        ({"pattern": "kda mamba"}, "pattern must name delta_net, .*, attention, gdn, gdn2, gdp, got 'mamba'"),
        ({"pattern": "kda*0"}, r"pattern must have a count of at least 1 after a \*, got 'kda\*0'"),
        ({"pattern": "kda*x"}, r"pattern must have a count of at least 1 after a \*, got 'kda\*x'"),
        ({"options": "window"}, "options must map mixers to their options, got str"),
        ({"options": {"mamba": {}}}, "options must name .*, got 'mamba'"),
        ({"options": {"kda": 3}}, r"options\['kda'\] must map names to values, got int"),
        ({"options": {"kda": {"window": 3}}}, r"options\['kda'\] must be among num_heads, .*, got 'window'"),
        (
            {"options": {"kda": {"lower_bound": 1.0}}},
            r"options\['kda'\]\['lower_bound'\] must be below 0, got 1.0, in kda",
        ),
        (
            {"options": {"attention": {"window": 2.5}}, "pattern": "kda"},
            r"options\['attention'\]\['window'\] must be an int, got float, in attention",
        ),
        ({"num_v_heads": 3}, r"num_v_heads must be a multiple of num_heads = 4, got 3, in gated_delta_net"),
        (
            {"options": {"gdn": {"norm_eps": None}}},
            r"options\['gated_delta_net'\]\['norm_eps'\] must be a number, got NoneType, in gated_delta_net",
        ),
        ({"head_dim": 300}, r"head_dim .*, got 300, in gated_delta_net"),
        ({"options": {"kda": {"hidden_size": 3}}}, r"options\['kda'\] must be among num_heads, .*, got 'hidden_size'"),
    ],
)
def test_configuration_errors_name_the_field(fields, message):
    with pytest.raises((ValueError, TypeError), match=f"^DecoderConfig: {message}$"):
        DecoderConfig(**fields)


def test_json_errors_name_the_field():
    with pytest.raises(ValueError, match=r"must be known to this version, got colour, size$"):
        DecoderConfig.from_json(json.dumps({"size": 1, "colour": 2, "num_heads": 3}))
    with pytest.raises(ValueError, match=r"must be a JSON object, got list$"):
        DecoderConfig.from_json("[]")
