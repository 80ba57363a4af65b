"""Invariant: memory formulas give the published numbers; pools keep to the budget."""

import random

import pytest

from jaxsched.cache.sizing import CacheBytes, pool_sizes
from jaxsched.cache.sizing_memory import (
    SnapshotRules,
    UnifiedPool,
    affine_memory,
    available_tokens,
    average_length,
    check_quota,
    count_snapshot_rules,
    num_snapshots,
    num_spare_state_slots,
    num_state_slots,
    split_layers,
    typical_step,
    unified_pool,
)
from jaxsched.cache.sizing_ranks import (
    admit_transfers,
    effective_block_size,
    rank_info,
    transfer_block_budget,
    transfer_buffer_tokens,
)
from oracles import sizing

SCHEDULE = {1: 4, 2: 2, 3: 1}
"""Batch -> draft length; above 3 requests none are drafted."""


def affine(**fields):
    fields = {
        "kv_bytes_per_token": 11,
        "state_bytes": 64,
        "max_num_seqs": 4,
        "block_size": 32,
        "max_seq_len": 128,
        **fields,
    }
    memory = affine_memory(**fields)
    return memory.slope, memory.intercept


def test_intercepts_count_live_and_spare_states():
    assert affine() == (11, 320)
    spare = num_spare_state_slots(attention_data_parallel=True)
    assert affine(num_spare_slots=spare) == (11, 384)
    spare = num_spare_state_slots(
        draft_lengths=SCHEDULE, max_num_seqs=4, attention_data_parallel=True
    )
    assert affine(num_spare_slots=spare) == (11, 576)


def test_spare_slots_are_one_for_each_draft_length_that_can_happen():
    assert num_spare_state_slots(draft_lengths=SCHEDULE, max_num_seqs=4) == 4
    assert num_spare_state_slots(draft_lengths=SCHEDULE, max_num_seqs=3) == 3
    assert (
        num_spare_state_slots(
            draft_lengths=SCHEDULE, max_num_seqs=3, accepts_variable_lengths=True
        )
        == 4
    )
    assert num_spare_state_slots(draft_lengths={8: 3}, max_num_seqs=4) == 1
    assert num_spare_state_slots() == 1


def test_fixed_snapshots_of_a_sequence():
    rules = count_snapshot_rules(
        offsets_from_start=[64, 65, 64],
        offsets_from_end=[0, 32, 4096],
        max_seq_len=128,
        block_size=32,
    )
    assert rules == SnapshotRules(count=4, unaligned=3)
    rules = count_snapshot_rules(
        offsets_from_start=[64],
        offsets_from_end=[0, 32],
        max_seq_len=128,
        block_size=32,
    )
    assert rules.count == 3
    kept = num_snapshots(
        max_num_seqs=4, pipeline_parallel=2, num_rules=3, max_tokens=512
    )
    assert kept == 24
    assert typical_step(128, 3, 1, 0) == [32] * 4
    assert typical_step(128, 0, 1, 0) == [128]
    assert typical_step(96, 2, 2, 1) == [32] * 6 + [0]
    assert sum(typical_step(100, 2, 3, 2)) == 300


def test_periodic_snapshots_are_a_share_of_every_token():
    """The partial block is the same for every interval; the unified pool has none."""
    assert affine(snapshot_interval=32) == (13, 320 + 4 * 32 * 11)
    assert affine(snapshot_interval=48) == (13, 320 + 4 * 32 * 11)
    assert affine(snapshot_interval=129) == (11, 320)
    assert affine(snapshot_interval=32, manager="unified") == (13, 320)
    # 48 is no multiple of the block: a block in 48 tokens is held twice.
    assert affine(snapshot_interval=48, manager="unified") == (13 + 8, 320)
    assert affine(num_rules=3, manager="unified") == (11, 320)
    assert affine(num_rules=2) == (11, (5 + 8) * 64 + 4 * 32 * 11)


def test_a_rank_without_attention_needs_its_states():
    memory = affine_memory(
        kv_bytes_per_token=0,
        state_bytes=64 + 32,
        max_num_seqs=2,
        block_size=32,
        max_seq_len=128,
    )
    assert (memory.slope, memory.intercept) == (0, 288)
    assert memory.tokens_in(10**6) is None
    assert memory.bytes_for(77) == 288
    check_quota(288, memory, 2)
    with pytest.raises(ValueError, match="raise it to at least 288"):
        check_quota(287, memory, 2)


def test_pipeline_ranks_of_different_layers_cost_differently():
    """M A M A and a drafting attention layer over two ranks: 64 and 128 bytes."""
    ranks = split_layers("MAMA", 2)
    ranks[-1].append("A")
    found = [
        affine(
            kv_bytes_per_token=64 * rank.count("A"),
            state_bytes=96 * rank.count("M"),
            max_num_seqs=12,
            pipeline_parallel=2,
        )
        for rank in ranks
    ]
    assert found == [(64, 2400), (128, 2400)]


def test_state_slots_of_the_published_managers():
    def slots(**fields):
        fields = {"manager": "unified", **fields}
        return num_state_slots(max_num_seqs=4, max_tokens=512, **fields)

    assert slots() == 5
    assert slots(max_draft_tokens=2) == 7
    assert slots(pipeline_parallel=2) == 9
    assert slots(pipeline_parallel=4) == 17
    assert slots(snapshot_interval=256) == 7
    assert slots(snapshot_interval=256, enable_prefix_caching=False) == 5
    assert slots(snapshot_interval=256, dry_run=True) == 6
    assert slots(manager="separate", num_spare_slots=5, num_rules=2) == 4 + 5 + 8
    with pytest.raises(ValueError, match="manager must be one of"):
        slots(manager="third")


def test_run_time_pool_of_the_unified_manager():
    fields = {"max_num_seqs": 4, "block_size": 32, "max_seq_len": 128}
    pool = unified_pool(
        budget=4096, kv_bytes_per_token=0, state_bytes=64, max_tokens=512, **fields
    )
    assert pool == UnifiedPool(num_tokens=512, num_blocks=16, num_state_slots=5)
    pool = unified_pool(budget=4096, kv_bytes_per_token=0, state_bytes=64, **fields)
    assert pool.num_tokens == 128 * 4
    pool = unified_pool(
        budget=4096,
        kv_bytes_per_token=11,
        state_bytes=64,
        snapshot_interval=48,
        **fields,
    )
    assert pool.num_tokens == (4096 - 256) // (11 + 1)  # a share is rounded down here


def test_tokens_that_snapshots_allow():
    assert available_tokens(10_000, 5, 256, has_states=True) == 1_024
    assert available_tokens(1_000, 5, 256, has_states=True) == 1_000
    assert available_tokens(10_000, 1, 256, has_states=True) == 0
    assert available_tokens(10_000, 0, 256, has_states=True) == 0
    assert available_tokens(10_000, 1, 256, has_states=False) == 10_000
    assert available_tokens(10_000, 1, 0, has_states=True) == 10_000
    # One slot is the live state: enough for a prompt that files nothing.
    assert available_tokens(10_000, 1, 256, has_states=True, short_prompt=100) == 100
    assert available_tokens(10_000, 1, 256, has_states=True, short_prompt=256) == 0
    assert available_tokens(10_000, 0, 256, has_states=True, short_prompt=100) == 0


def test_the_average_length_is_guessed_with_a_warning():
    assert average_length(96, 128) == 96
    with pytest.warns(UserWarning, match="2048 tokens"):
        assert average_length(None, 4096) == 2048
    with pytest.raises(ValueError, match="avg_seq_len must be <= 128"):
        average_length(129, 128)


def test_transfer_buffers_hold_whole_blocks():
    def tokens(limit, length, **fields):
        return transfer_buffer_tokens(limit, max_seq_len=length, **fields)

    assert tokens(None, 2049, block_size=32) == 2080
    assert tokens(None, 2049, block_size=64) == 2112
    assert tokens(None, 2049, block_size=32, attention_kernel="FlashMLA") == 2112
    assert tokens(None, 2048, block_size=32) == 2048
    assert tokens(2049, 4096, block_size=32) == 2049  # an explicit value is kept
    assert effective_block_size(32, "flashmla") == 64
    assert effective_block_size(32, "other") == effective_block_size(32) == 32


def test_transfers_start_in_order_while_the_buffer_holds_them():
    assert transfer_block_budget(100, 32) == 4
    assert transfer_block_budget(None, 32) is transfer_block_budget(0, 32) is None
    assert admit_transfers([64, 64, 64], 32, 4) == 2
    assert admit_transfers([64, 640, 32], 32, 4) == 1  # nobody overtakes
    assert admit_transfers([640, 32], 32, 4) == 1  # alone, it would wait for ever
    assert admit_transfers([640], 32, 4, num_active_blocks=1) == 0
    assert admit_transfers([640, 640], 32, None) == 2


def test_rank_info_skips_layers_without_heads():
    def heads(counts):
        return rank_info(counts, block_size=32).num_kv_heads

    assert [heads(h) for h in ([0, 0, 8, 8], [0, 0], [4, 8], [])] == [8, 0, 4, 0]
    info = rank_info([0, 0, 8, 0, 8], block_size=32, attention_kernel="flashmla")
    assert (info.num_kv_heads, info.num_attention_layers) == (8, 2)
    assert info.block_size == 64
    info = rank_info(
        [8],
        block_size=32,
        tensor_parallel=4,
        tensor_rank=3,
        attention_data_parallel=True,
    )
    assert (info.dp_size, info.dp_rank, info.tensor_parallel) == (4, 3, 1)
    info = rank_info([8], block_size=32, tensor_parallel=4, tensor_rank=3)
    assert (info.dp_size, info.dp_rank, info.tensor_parallel) == (1, 0, 4)


def test_pools_are_those_of_counting():
    rng = random.Random(3)
    for _ in range(400):
        kv, state = rng.choice((0, 1, 7, 64)), rng.randrange(1, 900)
        size, live = rng.choice((1, 16, 64)), rng.randrange(1, 6)
        interval = rng.choice((0, 16, 48, 100, 512))
        budget = live * state + size * kv + rng.randrange(0, 20_000)
        sizes = CacheBytes(weights=0, kv_per_token=kv, state=state)
        pools = pool_sizes(
            sizes,
            budget,
            block_size=size,
            num_live_slots=live,
            snapshot_interval=interval,
        )
        expected = sizing.pools(budget, kv, state, size, live, interval)
        assert (pools.num_blocks, pools.num_snapshots) == expected
        held = pools.num_tokens * kv + (live + pools.num_snapshots) * state
        assert held == pools.used <= budget


def test_pools_with_fixed_counts():
    sizes = CacheBytes(weights=0, kv_per_token=10, state=1_000)
    pools = pool_sizes(
        sizes, 100_000, block_size=16, num_live_slots=4, num_snapshots=20
    )
    assert (pools.num_snapshots, pools.num_blocks) == (20, 76_000 // 160)
    pools = pool_sizes(
        sizes,
        100_000,
        block_size=16,
        num_live_slots=4,
        snapshot_interval=100,
        max_tokens=320,
    )
    assert (pools.num_tokens, pools.num_snapshots) == (320, 4)
    with pytest.raises(ValueError, match="set it to at most 95"):
        pool_sizes(sizes, 100_000, block_size=16, num_live_slots=4, num_snapshots=96)
    with pytest.raises(ValueError, match="at least 4160 bytes or lower max_num_seqs"):
        pool_sizes(sizes, 4_159, block_size=16, num_live_slots=4)


def test_the_interval_does_not_hang_on_the_block_size():
    """A state in every block of 16 tokens: 640 of 12.9 MB for 10,240 tokens, not 5."""
    fields = {
        "kv_bytes_per_token": 0,
        "state_bytes": 12_900_000,
        "max_num_seqs": 1,
        "block_size": 16,
        "max_seq_len": 10_240,
    }
    for interval, states in ((16, 640), (2_048, 5)):
        memory = affine_memory(snapshot_interval=interval, **fields)
        kept = memory.bytes_for(10_240) - memory.intercept
        assert states <= kept / 12_900_000 < states + 0.01


def test_where_reuse_collapses():
    """Slots that are left beside those that rows own: one state a cached prefix."""

    def distinct_prefixes(groups, slots, owned, running):
        live = owned * running
        each = num_state_slots(max_num_seqs=live, max_tokens=0, num_spare_slots=0)
        return groups * (slots // groups - each)

    assert distinct_prefixes(groups=4, slots=256, owned=3, running=2) == 232
    assert distinct_prefixes(groups=1, slots=64, owned=3, running=8) == 40
