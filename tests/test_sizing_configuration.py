"""Invariant: every configuration that cannot work is refused, and told what to set.

One line a rule: a change to a valid configuration, and what its message must say.
"""

import dataclasses

import pytest

from jaxsched.cache.configuration import (
    CAPACITY_POLICIES,
    CacheConfig,
    check_cache_config,
    interval_from_alias,
    select_manager,
    without_useless_reuse,
)
from jaxsched.scheduling.capacity_state import CapacityPolicy

SENT = {"disaggregated": True, "transfer_backend": "nixl"}
BY_PYTHON = {**SENT, "transfer_runtime": "python"}
NO_REUSE = {"enable_prefix_caching": False}

RULES = [
    (
        {"max_context_length": 63},
        "max_context_length=63 .* set max_context_length to at least 64",
    ),
    (
        {"max_context_length": 63, "block_size": 32, "attention_kernel": "flashmla"},
        "at least 64",
    ),
    ({"chunking_policy": "fastest"}, "chunking_policy must be one of"),
    ({"capacity_policy": "most"}, "capacity_policy must be one of"),
    ({"manager": "v3"}, "manager must be one of"),
    ({"transfer_runtime": "rust"}, "transfer_runtime must be one of"),
    ({"transfer_backend": "pigeon"}, "transfer_backend must be one of"),
    ({"offsets_from_start": 64, "manager": "v2"}, "offsets_from_start must be a list"),
    ({"offsets_from_end": None}, "offsets_from_end must be a list"),
    (
        {"offsets_from_end": [-1], "manager": "v2"},
        r"offsets_from_end\[0\] must be >= 0",
    ),
    (
        {"max_context_length": 128, "max_encoder_tokens": 129},
        "max_encoder_tokens=129 .* raise max_context_length",
    ),
    (
        {"max_context_length": 128, "chunking_policy": "none"},
        "max_seq_len=8192 is above max_context_length=128",
    ),
    ({"encoder_decoder": True}, "set has_cross_pool"),
    ({"manager": "mixed"}, "mixed.* set enable_prefix_caching=False or manager='v2'"),
    *(
        (
            {"manager": "mixed", **NO_REUSE, **SENT, "transfer_runtime": runtime},
            "manager='mixed' needs transfer_runtime='python'",
        )
        for runtime in ("cpp", None, "auto")
    ),
    ({"manager": "v2", **SENT}, "manager='v2' needs transfer_runtime='python'"),
    (
        {"manager": "v2", "transfer_runtime": "cpp"},
        "manager='v2' needs transfer_runtime='python', got 'cpp'",
    ),
    ({"manager": "cpp", **BY_PYTHON}, "manager='cpp' .* set transfer_runtime='cpp'"),
    (
        {"manager": "v2", **BY_PYTHON, "transfer_backend": "ucx"},
        "transfer_runtime='python' needs transfer_backend='nixl', got 'ucx'",
    ),
    (BY_PYTHON, "needs manager='v2', got 'auto'"),
    ({"offsets_from_start": [64]}, "need manager='v2', got 'auto'"),
    ({"offsets_from_end": [0], "manager": "cpp"}, "need manager='v2', got 'cpp'"),
    ({"offsets_from_end": [0], **NO_REUSE}, "need manager='v2'"),
    ({"manager": "v2", "beam_width": 2}, "needs beam_width=1, got 2"),
    ({"manager": "v2", "kv_connector": True}, "set kv_connector=False"),
    (
        {"needs_python_transfer": True, **SENT, "transfer_runtime": "cpp"},
        "set transfer_runtime='python' and transfer_backend='nixl'",
    ),
    ({"num_state_slots": 256}, "set it to at least 257 or lower max_num_seqs"),
    ({"num_layers": 4, "layer_mask": [True] * 3}, "layer_mask has 3 entries"),
    ({"num_layers": 2, "kv_heads_per_layer": [8]}, "kv_heads_per_layer has 1 entries"),
    ({"conv_layout": "rows"}, "conv_layout must be one of"),
    ({"model_kind": "rwkv"}, "model_kind must be one of"),
    ({"model_kind": "mamba2", "manager": "v2"}, "leave model_kind unset"),
    (
        {"num_state_heads": 6, "tensor_parallel": 4},
        "num_state_heads=6 cannot be divided by tensor_parallel=4",
    ),
    ({"conv_channels": 6, "tensor_parallel": 4}, "conv_channels=6 cannot be divided"),
    (
        {"state_bytes_per_layer": 1000, "state_alignment": 256},
        "pad the state to 1024 bytes",
    ),
    ({"ahead_of_time": True, **SENT}, "set ahead_of_time=False"),
    ({"block_size": 0}, "block_size must be >= 1"),
    ({"snapshot_interval": 1.5}, "snapshot_interval must be an integer"),
    ({"enable_prefix_caching": 1}, "enable_prefix_caching must be true or false"),
]


@pytest.mark.parametrize(("change", "message"), RULES)
def test_a_broken_rule_is_named(change, message):
    check_cache_config(CacheConfig())
    with pytest.raises(ValueError, match=message):
        check_cache_config(CacheConfig(**change))


@pytest.mark.parametrize(
    ("change", "manager"),
    [
        ({}, "cpp"),
        ({**BY_PYTHON, **NO_REUSE}, "mixed"),
        ({**SENT, "transfer_runtime": "cpp"}, "cpp"),
        ({"manager": "v2", **BY_PYTHON}, "v2"),
        ({"manager": "v2", **BY_PYTHON, "transfer_backend": "default"}, "v2"),
        ({"manager": "v2", "offsets_from_start": [64], **NO_REUSE}, "v2"),
        ({"manager": "mixed", **NO_REUSE}, "mixed"),
        # Without a backend there is nothing to send, hence nothing to refuse.
        ({"disaggregated": True, "transfer_runtime": "python"}, "cpp"),
        ({"manager": "mixed", **NO_REUSE, "disaggregated": True}, "mixed"),
    ],
)
def test_valid_configurations_get_their_manager(change, manager):
    assert select_manager(CacheConfig(**change)) == manager


def test_rules_of_recurrent_models_do_not_bind_others():
    for change in ({"beam_width": 4, "manager": "v2"}, {"manager": "mixed"}):
        check_cache_config(CacheConfig(has_recurrent_layers=False, **change))


def test_every_consumer_reads_the_block_size_of_the_kernel():
    config = CacheConfig(block_size=32, attention_kernel="flashmla", max_seq_len=2049)
    assert config.effective_block_size == config.chunk_unit_size == 64
    assert config.transfer_buffer_tokens == 2112
    plain = dataclasses.replace(config, attention_kernel=None)
    assert (plain.chunk_unit_size, plain.transfer_buffer_tokens) == (32, 2080)
    kept = dataclasses.replace(config, max_tokens_in_buffer=2049)
    assert kept.transfer_buffer_tokens == 2049


def test_reuse_without_snapshots_is_turned_off_aloud():
    for change in ({}, {"snapshot_interval": None}, {"snapshot_interval": 9_000}):
        with pytest.warns(UserWarning, match="enable_prefix_caching is turned off"):
            found = without_useless_reuse(CacheConfig(**change))
        assert not found.enable_prefix_caching
    for change in (
        {"snapshot_interval": 512},
        {"offsets_from_end": [0]},
        {"has_recurrent_layers": False},
        {"enable_prefix_caching": False},
    ):
        config = CacheConfig(**change)
        assert without_useless_reuse(config) is config


def test_the_old_name_of_the_interval():
    assert interval_from_alias(None, None) == 0
    assert interval_from_alias(512, None) == 512
    with pytest.warns(UserWarning, match="deprecated"):
        assert interval_from_alias(0, 256) == 256
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="disagree"):
        interval_from_alias(512, 256)


def test_policy_names_are_those_of_admission():
    assert CAPACITY_POLICIES == tuple(str(policy) for policy in CapacityPolicy)
