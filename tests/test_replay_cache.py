"""A replay with its cache is the oracle's, which keeps real token lists."""

import random

import pytest

from replay_cases import compare, draw_lines

LIMITED = {"kv_blocks": 70, "state_slots": 9, "eviction": "lru_paths"}
KINDS = {
    "unlimited": {},
    "emit": {"snapshot_mode": "emit", "max_emit_points": 2},
    "lru": LIMITED,
    "growing": {**LIMITED, "kv_blocks": 40, "capacity_policy": "max_utilization"},
}


def draw_options(draw):
    return {
        "block_size": 16,
        "chunk_unit": draw.choice((1, 8, 16)),
        "max_num_seqs": draw.choice((3, 4)),
        "max_num_batched_tokens": draw.choice((16, 33, 64, 300, 0)),
        "max_context_length": draw.choice((0, 0, 50)),
        "snapshot_interval": draw.choice((0, 16, 24, 100)),
        "snapshot_from_end": (draw.choice((0, 1, 500)),),
        "save_last": draw.random() < 0.5,
        "branch_snapshots": draw.random() < 0.7,
        "answer_snapshots": draw.random() < 0.7,
        "decode_snapshots": draw.random() < 0.7,
    }


def check(kind, seeds, path):
    hits = 0
    for seed in seeds:
        draw = random.Random(seed)
        lines = draw_lines(draw, draw.randint(2, 14), with_holes=draw.random() < 0.5)
        jobs, _ = compare(lines, path, **draw_options(draw), **KINDS[kind])
        hits += sum(job.report.get("num_cached_tokens", 0) > 0 for job in jobs)
    assert hits > len(seeds) // 2


def test_limited_pools_follow_the_oracle(tmp_path):
    check("lru", range(6), tmp_path / "lines.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_follows_the_oracle(kind, tmp_path):
    check(kind, range(100, 140), tmp_path / "lines.jsonl")


def test_what_a_hit_pins_is_no_charge_on_an_unlimited_pool(tmp_path):
    lines = [
        {"id": "a", "timestamp": 0, "output_length": 20, "segments": [["u", 450]]},
        {
            "id": "b",
            "timestamp": 9000,
            "output_length": 2,
            "segments": [["u", 450], ["answer:a", 20], ["v", 9]],
        },
    ]
    chosen = {"block_size": 16, "chunk_unit": 16, "snapshot_interval": 0}
    chosen |= {"max_num_batched_tokens": 300, "max_num_seqs": 4, "save_last": True}
    jobs, _ = compare(lines, tmp_path / "lines.jsonl", **chosen)
    assert jobs[1].report["num_cached_tokens"] == 469
