"""Invariant 4: a hybrid hit needs every block, a state exactly there, one token left.

The numbers are those of public bug reports of serving engines.
"""

import dataclasses

import jax
import pytest

from cache_server import CONFIG, Server, segment
from jaxsched.cache.hybrid import HybridConfig, MissReason, empty_cache
from jaxsched.cache.states import live_slot


def test_a_repeated_prompt_always_computes_a_token():
    server = Server()
    prompt = segment("a", 64)
    server.serve(prompt, points=[16, 32, 48, 64])
    assert server.lookup(prompt)[0] == 48
    assert server.lookup([*prompt, 1])[0] == 64


@pytest.mark.parametrize(("length", "reused"), [(6464, 6400), (256, 192)])
def test_an_identical_prompt_reuses_up_to_its_last_boundary(length, reused):
    server = Server()
    prompt = segment("same", length)
    assert server.serve(prompt, interval=64) == 0
    assert server.serve(prompt) == reused


def test_a_state_at_the_end_alone_gives_an_identical_prompt_nothing():
    server = Server()
    prompt = segment("end", 256)
    server.serve(prompt, points=[256])
    assert server.lookup(prompt) == (0, 255, MissReason.NO_STATE, 0)


@pytest.mark.parametrize(
    ("shared", "length", "reused"),
    [(1600, 2200, 1584), (1500, 2200, 1056), (552, 979, 528), (500, 979, 0)],
)
def test_a_grid_of_528_over_blocks_of_16(shared, length, reused):
    server = Server()
    start = segment("s", shared)
    server.serve([*start, *segment("a", length - shared)], interval=528)
    second = [*start, *segment("b", length - shared)]
    cached, kv, reason, _ = server.lookup(second)
    assert (cached, kv) == (reused, shared // 16 * 16)
    assert reason == (MissReason.FLOORED if reused else MissReason.NO_STATE)


def test_a_branch_point_is_learned_by_the_second_and_used_by_the_third():
    server = Server()
    start = segment("sys", 2000)
    lengths = (("a", 1000), ("b", 3000), ("c", 3000))
    got = [server.serve([*start, *segment(n, k)], branch=True) for n, k in lengths]
    assert got == [0, 0, 2000]
    assert server.depths() == [2000]  # one-off prompts make no other states


def test_no_branch_point_at_the_end_of_a_prompt_or_without_a_fork():
    server = Server()
    prompt = segment("p", 640)
    server.serve(prompt)
    assert server.lookup(segment("q", 640))[3] == 0
    assert server.lookup(prompt)[3] == 0
    assert server.lookup(prompt[:320])[3] == 0
    assert server.lookup([*prompt[:320], 5, 6])[3] == 320


def test_a_state_at_any_depth_is_usable_and_its_tail_is_copied():
    server = Server()
    prompt = segment("tail", 571)
    server.serve(prompt, points=[570])
    placed = server.reserve(prompt, [0])
    assert placed.num_cached_tokens[0] == 570
    assert placed.num_copied_tokens[0] == 570 % 16
    assert placed.block_source[0] != placed.block_target[0]


def test_the_next_turn_starts_where_the_answer_ended():
    server = Server()
    first, answer = segment("u1", 11_500), segment("out", 615)
    server.serve(first, answer, points=[12_115])
    assert server.lookup([*first, *answer, *segment("u2", 31)])[0] == 12_115


def test_inner_snapshots_survive_a_longer_sequence_over_them():
    server = Server()
    start = segment("s", 512)
    server.serve(start, points=[256, 512])
    server.serve([*start, *segment("a", 512)], points=[1024])
    assert server.depths() == [256, 512, 1024]
    assert server.lookup([*start, *segment("b", 64)])[0] == 512


def test_blocks_without_a_state_and_why():
    server = Server()
    start = segment("s", 1600)
    server.serve([*start, *segment("a", 40)], points=[1632])
    found = server.lookup([*start, *segment("b", 376)])
    assert found[:3] == (0, 1600, MissReason.NO_STATE)


def test_adapters_and_salts_share_nothing():
    server = Server()
    prompt = segment("x", 128)
    server.serve(prompt, points=[64], lora_id=3, salt=1)
    assert server.lookup(prompt, lora_id=3, salt=1)[0] == 64
    for names in ({}, {"lora_id": 3}, {"lora_id": 2, "salt": 1}, {"salt": 1}):
        assert server.lookup(prompt, **names)[:2] == (0, 0)
    assert server.lookup(prompt, lora_id=3, salt=1, reads=False)[0] == 0


def test_nothing_is_shared_before_it_is_computed():
    """Two prompts of one step: the second gets nothing of the first's blocks."""
    server = Server()
    prompt = segment("abc", 48)
    placed = server.reserve([prompt, prompt], [0, 1])
    assert placed.granted.tolist() == [True, True]
    assert placed.num_cached_tokens.tolist() == [0, 0]
    server.commit({0: 48, 1: 48}, {0: [32], 1: [32]})
    tables = jax.device_get(server.cache.rows.block_tables)
    assert tables[0, :3].tolist() == tables[1, :3].tolist()  # one copy is kept
    assert server.depths() == [32]


def test_a_request_cancelled_before_it_ran_leaves_nothing():
    server = Server()
    prompt = segment("gone", 320)
    server.reserve(prompt, [0])
    server.release(0)
    assert server.lookup(prompt) == (0, 0, MissReason.NO_PREFIX, 0)


def test_a_request_cancelled_halfway_leaves_what_it_computed():
    server = Server()
    prompt = segment("half", 320)
    server.reserve(prompt, [0])
    server.commit({0: 160}, {0: [160]})
    server.release(0)
    assert server.lookup(prompt)[:2] == (160, 160)


def test_what_does_not_fit_leaves_everything_as_it_was():
    server = Server(num_blocks=40)
    assert server.reserve(segment("a", 480), [0]).granted[0]
    before = jax.device_get((server.cache.blocks, server.cache.rows))
    placed = server.reserve([segment("b", 400), segment("c", 16)], [1])
    assert not placed.granted.any()
    after = jax.device_get((server.cache.blocks, server.cache.rows))
    assert all(
        (x == y).all()
        for x, y in zip(*map(jax.tree.leaves, (before, after)), strict=True)
    )


def test_allocation_takes_all_that_can_go_and_never_what_is_held():
    server = Server(num_blocks=40)
    server.serve(segment("old", 320), points=[320])
    assert server.reserve(segment("run", 320), [0]).granted[0]
    server.commit({0: 320}, {0: [320]})
    assert server.reserve(segment("new", 320), [1]).granted[0]
    assert server.lookup([*segment("run", 320), 1])[0] == 320
    assert server.lookup([*segment("old", 320), 1])[:3] == (0, 0, MissReason.EVICTED)


def test_a_prompt_that_can_never_fit_stops_nobody():
    server = Server(num_blocks=40)
    placed = server.reserve([segment("huge", 700), segment("b", 64)], [0, 1])
    assert placed.granted.tolist() == [False, True]


def test_a_cap_drops_the_shallowest_state_of_a_path_that_is_no_fork():
    server = Server(path_limit=4)
    prompt = segment("path", 640)
    for end in range(64, 641, 64):
        server.serve(prompt[:end], points=[end])
    assert server.depths() == [448, 512, 576, 640]
    server.serve([*prompt[:448], *segment("other", 64)], points=[512])
    server.serve([*prompt, *segment("more", 64)], points=[704])
    assert server.depths() == [448, 512, 576, 640, 704]  # 512 is the sibling's
    assert server.lookup([*prompt[:512], 7])[0] == 448


def test_padding_rows_run_in_the_dummy_slot():
    assert live_slot(jax.numpy.int32([-1, 0, 1])).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_size", 0, "block_size must be >= 1"),
        ("num_ghosts", 3, "num_ghosts must be >= 28"),
        ("num_seen", 1000, "num_seen must be a power of two"),
        ("pages_per_snapshot", 100, "at most 16 do"),
        ("blocks_per_row", 2**17, "use larger blocks"),
        ("key_bits", 33, "key_bits must be <= 32"),
    ],
)
def test_sizes_that_cannot_work_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{field: value})


def test_limits_beyond_what_is_allocated_are_refused():
    config = HybridConfig(
        block_size=4, num_blocks=8, blocks_per_row=4, num_rows=1, num_snapshots=2
    )
    with pytest.raises(ValueError, match="num_blocks must be <= 8"):
        empty_cache(config, num_blocks=9)
    with pytest.raises(ValueError, match="path_limit must be >= 1"):
        empty_cache(config, path_limit=0)
