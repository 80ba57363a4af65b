"""A published config.json means one thing, in old and new spelling, or is refused."""

import math

import pytest

from jaxsched.models.config import Layer, MambaConfig, ModelConfig
from jaxsched.models.families import FAMILIES, parse_config, read_config
from jaxsched.models.keys import Keys
from model_cases import FALCON, NEMOTRON, TINY, tiny, values_of


def test_infinity_as_it_is_written():
    keys = Keys({"limit": [0.5, {"__float__": "Infinity"}]}, "here")
    assert keys.pair("limit", (0.0, 1.0)) == (0.5, math.inf)


def test_a_whole_hybrid_layer():
    config = read_config(FALCON)
    assert config.layers == (Layer(mixer="parallel", feed_forward="mlp"),) * 2
    assert config.mamba_layers == config.attention_layers == (0, 1)
    assert config.mamba.multipliers == (0.9, 1.1, 0.7, 0.8, 0.6)
    assert config.mamba.projection_size == 2 * 64 + 2 * 2 * 8 + 4
    assert config.attention.rotary.dim == config.attention.head_dim == 8


def test_one_mixer_a_block():
    config = read_config(NEMOTRON)
    kinds = [(layer.mixer, layer.feed_forward) for layer in config.layers]
    assert kinds == [
        ("mamba", "none"),
        ("none", "moe"),
        ("attention", "none"),
        ("none", "moe"),
        ("mamba", "none"),
    ]
    assert config.mamba.time_step_limit == (0.001, math.inf)
    assert config.attention.rotary is None
    assert (config.moe.latent_size, config.moe.scaling) == (16, 2.5)


def test_old_and_new_layer_names_agree():
    values = values_of(NEMOTRON)
    del values["layers_block_type"]
    letters = parse_config(values | {"hybrid_override_pattern": "ME*EM"})
    old = ["mamba", "moe", "attention", "moe", "mamba"]
    assert letters == parse_config(values | {"layers_block_type": old})
    assert letters == read_config(NEMOTRON)


def test_old_and_new_rotary_settings_agree():
    values = values_of(FALCON)
    del values["rope_parameters"]
    assert parse_config(values | {"rope_theta": 10000.0}) == read_config(FALCON)
    linear = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5.0}
    rotary = parse_config(values | linear).attention.rotary
    assert (rotary.theta, rotary.scaling_factor) == (5.0, 4.0)


def test_bamba_turns_half_a_head_unless_told():
    assert tiny("bamba", head_dim=8).attention.rotary.dim == 4
    given = {"rope_parameters": {"partial_rotary_factor": 0.25}}
    assert tiny("bamba", head_dim=8, **given).attention.rotary.dim == 2


def test_shared_blocks_take_turns():
    names = ["mamba", "hybrid", "hybrid", "mamba", "hybrid"]
    config = tiny("zamba2", layers_block_type=names, num_mem_blocks=2)
    assert [layer.shared_block for layer in config.layers] == [-1, 0, 1, -1, 0]
    assert config.attention.scale == pytest.approx((8 / 2) ** -0.5)
    assert config.tie_embeddings


def test_every_family_has_a_tiny_model():
    assert set(TINY) == set(FAMILIES)
    for family in FAMILIES:
        assert hash(tiny(family)) == hash(tiny(family))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"model_type": "jamba"}, "model_type must be one of bamba"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size must be a whole number"),
        ({"mamba_d_head": 17}, "mamba_d_head must be 16"),
        ({"mamba_n_groups": 3}, "num_groups must be a divisor of num_heads=4"),
        ({"num_key_value_heads": 3}, "num_kv_heads must be a divisor"),
        ({"hidden_act": "mish"}, "hidden_act must be one of"),
        ({"time_step_limit": [0.5, 0.1]}, "time_step_limit must be a pair"),
        ({"time_step_limit": [0.5]}, "time_step_limit must be a list of 2 numbers"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default'"),
        ({"ssm_multipliers": [1, 2]}, "ssm_multipliers must be a list of 5"),
        ({"mamba_d_conv": 1}, "conv_width must be at least 2"),
        ({"mamba_rms_norm": 1}, "mamba_rms_norm must be true or false"),
    ],
)
def test_what_does_not_fit_is_named(changes, said):
    with pytest.raises(ValueError) as wrong:
        parse_config(values_of(FALCON) | changes, "folder/config.json")
    assert str(wrong.value).startswith("folder/config.json: ")
    assert said in str(wrong.value)


def test_a_layer_needs_its_part():
    with pytest.raises(ValueError, match="ModelConfig.mamba must be given"):
        ModelConfig(
            family="mamba2",
            vocab_size=3,
            hidden_size=4,
            norm_eps=1e-5,
            layers=(Layer(),),
        )
    with pytest.raises(ValueError, match="Layer.mixer must be one of"):
        Layer(mixer="rwkv")
    with pytest.raises(ValueError, match="shared_block must be a block index"):
        Layer(mixer="shared")


@pytest.mark.parametrize("text, said", [("{", "not valid JSON"), ("[]", "JSON object")])
def test_a_broken_file_is_named(tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_config(tmp_path)
    with pytest.raises(ValueError, match="missing/config.json: cannot be read"):
        read_config(tmp_path / "missing")


def test_sizes_follow_from_heads():
    mamba = MambaConfig(
        num_heads=6, head_dim=4, state_size=5, num_groups=2, conv_width=4, chunk_size=8
    )
    assert (mamba.inner_size, mamba.conv_channels, mamba.raw_size) == (24, 44, 50)
