"""Invariant 3: blocks are handed out once, counted exactly, and never lost."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched.cache import grouping
from jaxsched.cache.blocks import (
    empty_blocks,
    empty_rows,
    free_blocks,
    hold,
    let_go,
    take_slices,
    write_tables,
)
from jaxsched.cache.grouping import first_equal, rank_in_group
from jaxsched.cache.index import clear, empty_index, find, find_room, put
from jaxsched.cache.selection import KEEP, compact, float_worth, recency, smallest


def test_a_block_is_free_only_when_nobody_has_it():
    blocks = empty_blocks(6, 4)
    hanging = jnp.int32([0, 0, 1, 0, 0, 0])
    blocks = hold(blocks, jnp.int32([[0, 0, 5]]), jnp.ones((1, 3), bool), jnp.int32(3))
    blocks = blocks.replace(
        place=blocks.place.at[1].set(7), state_slot=blocks.state_slot.at[3].set(2)
    )
    assert free_blocks(blocks, hanging, jnp.int32(6)).tolist() == [False] * 4 + [
        True,
        False,
    ]
    assert not free_blocks(blocks, hanging, jnp.int32(4))[4]
    assert blocks.num_refs.tolist() == [2, 0, 0, 0, 0, 1]
    blocks = let_go(blocks, jnp.int32([[0, 5, 4]]), jnp.asarray([[True, True, False]]),
                    jnp.int32(9))  # fmt: skip
    assert blocks.num_refs.tolist() == [1, 0, 0, 0, 0, 0]
    assert blocks.last_used.tolist() == [9, 0, 0, 0, 0, 9]


def test_slices_of_the_free_list_do_not_overlap():
    order = compact(jnp.asarray([False, True, True, False, True, True]))
    assert order.tolist() == [1, 2, 4, 5, 6, 6]
    slices = take_slices(order, jnp.int32([2, 0, 1]), 3)
    assert slices.tolist() == [[1, 2, 6], [6, 6, 6], [4, 6, 6]]


def test_tables_grow_where_they_end():
    rows = empty_rows(2, 4, 9)
    rows = write_tables(
        rows, jnp.int32([1, 2]), jnp.int32([0, 0]), jnp.int32([2, 1]),
        jnp.int32([[5, 3, 9, 9], [7, 9, 9, 9]]),
    )  # fmt: skip
    assert rows.block_tables.tolist() == [[9] * 4, [5, 3, 9, 9]]
    assert rows.num_blocks.tolist() == [0, 2]


@pytest.mark.parametrize("limit", [768, 0])
def test_groups_are_those_of_plain_loops(limit, monkeypatch):
    monkeypatch.setattr(grouping, "PAIRWISE_LIMIT", limit)
    random = np.random.default_rng(2)
    for _ in range(20):
        size = int(random.integers(1, 30))
        values, mask = random.integers(0, 4, size), random.random(size) < 0.7
        first, rank = list(range(size)), []
        for at in range(size):
            same = [k for k in range(size) if mask[k] and values[k] == values[at]]
            if mask[at]:
                first[at] = same[0]
                rank.append(sum(k < at for k in same))
        words = (jnp.uint32(values), jnp.zeros(size, jnp.uint32))
        mask = jnp.asarray(mask)
        assert first_equal(words, mask).tolist() == first
        assert rank_in_group(jnp.int32(values), mask)[mask].tolist() == rank


def test_the_smallest_go_until_it_is_enough():
    random = np.random.default_rng(3)
    for _ in range(60):
        size = int(random.integers(1, 20))
        scale = int(random.choice([1, 2**27]))
        key = random.integers(0, 8, size).astype(np.uint32) * np.uint32(scale)
        key[random.random(size) < 0.3] = KEEP
        weight = random.integers(0, 4, size)
        need, got = int(random.integers(-2, 25)), 0
        taken = [False] * size
        for at in sorted(range(size), key=lambda at: (key[at], at)):
            if key[at] != KEEP and got < need:
                taken[at], got = True, got + weight[at]
        for form in ("halving", "sort"):
            found = smallest(jnp.asarray(key), jnp.int32(weight), jnp.int32(need), form)
            assert found.tolist() == taken


def test_worth_keeps_the_order_of_what_it_stands_for():
    scores = jnp.float32([0.0, 1e-6, 2e-6, 0.5, 1.0, 3.0, 1e9])
    assert (jnp.diff(float_worth(scores, 17).astype(jnp.int32)) > 0).all()
    ages = recency(jnp.int32([0, 1, 5, 2**20]), 10).tolist()
    assert ages == [1023, 1022, 1018, 0]


def test_the_index_finds_what_was_put_and_not_what_was_cleared():
    random = np.random.default_rng(4)
    index, where = empty_index(64), {}
    for _ in range(40):
        keys = jnp.asarray(random.integers(0, 2**32, (2, 8)), jnp.uint32)
        place = find_room(index, keys, jnp.ones(8, bool))
        assert (place >= 0).all() and len(set(place.tolist())) == 8
        blocks = [b for b in range(64) if b not in where][:8]
        index = put(index, place, keys, jnp.int32(blocks))
        where.update({b: (keys[:, i], int(place[i])) for i, b in enumerate(blocks)})
        assert find(index, keys).tolist() == blocks
        if len(where) > 40:
            old = list(where)[:16]
            index = clear(index, jnp.int32([where[b][1] for b in old]))
            gone = jnp.stack([where.pop(b)[0] for b in old], axis=1)
            assert find(index, gone).tolist() == [-1] * 16


def test_full_buckets_refuse_and_lose_nothing():
    index = empty_index(8, ways=8)  # two buckets
    keys = jnp.stack([jnp.full(20, 4, jnp.uint32), jnp.arange(20, dtype=jnp.uint32)])
    place = find_room(index, keys, jnp.ones(20, bool))
    assert sorted(place.tolist())[:12] == [-1] * 12
    assert len(set(place.tolist()) - {-1}) == 8
