"""A snapshot is all of a state: every per-slot array, every type, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.cache.states import (
    copy_slots,
    empty_states,
    forget,
    most_behind,
    nearest_ancestors,
    sum_behind,
    zero_slots,
)

SLOTS = 6


def _pools():
    """Arrays as real states have them: conv tails, scan states, side states."""
    random = np.random.default_rng(0)
    return {
        "conv": [jnp.asarray(random.normal(size=(SLOTS, 40, 3)), jnp.bfloat16)],
        "ssm": jnp.asarray(random.normal(size=(SLOTS, 2, 4, 8)), jnp.float32),
        "side": (jnp.arange(SLOTS * 2, dtype=jnp.int32).reshape(SLOTS, 2),),
        "flags": jnp.arange(SLOTS) % 2 == 0,
        "bytes": jnp.arange(SLOTS, dtype=jnp.uint8),
    }


def test_every_array_of_any_pytree_is_copied():
    pools = _pools()
    copied = copy_slots(pools, jnp.int32([1, 4]), jnp.int32([5, 2]))
    for old, new in zip(*map(jax.tree.leaves, (pools, copied)), strict=True):
        assert old.dtype == new.dtype and old.shape == new.shape
        order = [0, 1, 4, 3, 4, 1]
        assert (np.asarray(new) == np.asarray(old)[order]).all()


def test_slots_can_be_exchanged_and_nothing_goes_past_the_end():
    pools = _pools()
    swapped = copy_slots(pools, jnp.int32([1, 2, 3]), jnp.int32([2, 1, SLOTS]))
    for old, new in zip(*map(jax.tree.leaves, (pools, swapped)), strict=True):
        assert (np.asarray(new) == np.asarray(old)[[0, 2, 1, 3, 4, 5]]).all()


def test_rows_without_a_hit_start_from_zeros():
    cleared = zero_slots(_pools(), jnp.int32([3, SLOTS]))
    for old, new in zip(*map(jax.tree.leaves, (_pools(), cleared)), strict=True):
        assert not np.asarray(new)[3].any()
        assert (np.asarray(new)[:3] == np.asarray(old)[:3]).all()
        assert (np.asarray(new)[4:] == np.asarray(old)[4:]).all()


def test_donated_pools_are_copied_like_kept_ones():
    jitted = jax.jit(copy_slots, donate_argnums=0)
    kept = _pools()
    donated = jax.tree.map(jnp.copy, kept)
    for step in range(4):
        source, target = jnp.int32([step, 5]), jnp.int32([5, (step + 1) % 5])
        kept = copy_slots(kept, source, target)
        donated = jitted(donated, source, target)
        for one, other in zip(*map(jax.tree.leaves, (kept, donated)), strict=True):
            assert (np.asarray(one) == np.asarray(other)).all()


def _random_forest(random, size):
    return [int(random.integers(-1, at)) if at else -1 for at in range(size)]


def test_walks_along_the_tree_are_those_of_plain_loops():
    random = np.random.default_rng(1)
    for _ in range(30):
        size = int(random.integers(1, 20))
        parent = _random_forest(random, size)
        wanted = random.random(size) < 0.4
        value = random.integers(0, 9, size)
        near, total, most = [], value.copy(), np.zeros(size, int)
        for at in range(size):
            up = parent[at]
            while up >= 0 and not wanted[up]:
                up = parent[up]
            near.append(up)
            up = parent[at]
            while up >= 0:
                total[up] += value[at]
                most[up] = max(most[up], value[at])
                up = parent[up]
        tree = jnp.int32(parent)
        assert nearest_ancestors(tree, jnp.asarray(wanted), 5).tolist() == near
        assert sum_behind(tree, jnp.int32(value), 5).tolist() == total.tolist()
        assert most_behind(tree, jnp.float32(value), 5).tolist() == most.tolist()


def test_children_of_what_is_forgotten_look_past_it():
    states = empty_states(5)
    states = states.replace(
        parent=jnp.int32([-1, 0, 1, 2, 0]), depth=jnp.int32([1, 2, 3, 4, 2])
    )
    left = forget(states, jnp.asarray([False, True, True, False, False]))
    assert left.parent.tolist() == [-1, -1, -1, 0, 0]
    assert left.depth.tolist() == [1, 0, 0, 4, 2]
