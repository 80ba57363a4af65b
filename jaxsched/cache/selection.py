"""Choosing what goes: the smallest keys of many until enough is freed.

One 32-bit key orders everything that can be evicted: what it is worth keeping, then
depth, deeper first, a state before the block it hangs on. As long as worth never grows
along a path, any number of smallest keys takes every descendant before its ancestor.

Two forms with the same answer: 32 halvings of the key space, for CPUs, and one sort,
without any loop, for accelerators. Shape letter: N things.
"""

import enum

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsched.core.masking import iota

Array = jax.Array

KEEP = np.uint32(2**32 - 1)
"""The key of what must not be evicted."""

_KEY_BITS = 31


class Selection(enum.StrEnum):
    """How the smallest keys are found."""

    HALVING = "halving"  # a loop of 32 sums: several times faster on a CPU
    SORT = "sort"  # no loop: for accelerators


def depth_bits(blocks_per_row: int) -> int:
    """Bits of the key that order by depth."""
    return (2 * blocks_per_row + 1).bit_length()


def worth_bits(blocks_per_row: int) -> int:
    """Bits of the key that order by worth."""
    return _KEY_BITS - depth_bits(blocks_per_row)


def recency(age: Array, bits: int) -> Array:
    """Worth of something last used `age` ticks ago, i32[N]; u32[N] of `bits` bits.

    Ages saturate: among the very old, depth alone decides.
    """
    top = (1 << bits) - 1
    return (top - jnp.clip(age, 0, top)).astype(jnp.uint32)


def float_worth(score: Array, bits: int) -> Array:
    """Worth of a score >= 0, f32[N]; u32[N] of `bits` bits, ascending with it."""
    positive = jnp.maximum(score, 0.0).astype(jnp.float32)
    return lax.bitcast_convert_type(positive, jnp.uint32) >> jnp.uint32(31 - bits)


def order_keys(
    worth: Array, depth: Array, is_block: bool, evictable: Array, blocks_per_row: int
) -> Array:
    """Keys to evict by, u32[N].

    Args:
      worth: u32[N].
      depth: i32[N], the block's number in its prompt; of a state, that of its block.
      is_block: false for states.
      evictable: bool[N].
      blocks_per_row: static.
    """
    low = 2 * (blocks_per_row - depth) + int(is_block)
    bits = jnp.uint32(depth_bits(blocks_per_row))
    return jnp.where(evictable, (worth << bits) | low.astype(jnp.uint32), KEEP)


def smallest(key: Array, weight: Array, need: Array, selection: Selection) -> Array:
    """The smallest keys whose weights sum up to `need`, ties by index; bool[N].

    Takes everything that can go where that is not enough, nothing where need <= 0.

    Args:
      key: u32[N], KEEP: never.
      weight: i32[N] >= 0.
      need: i32[].
      selection: static.
    """
    weight = jnp.where(key == KEEP, 0, weight)
    if selection == Selection.SORT:
        sorted_key, index = lax.sort((key, iota(key.shape[0])), num_keys=1)
        freed = weight[index]
        taken = (jnp.cumsum(freed) - freed < need) & (sorted_key != KEEP)
        return jnp.zeros(key.shape[0], bool).at[index].set(taken, unique_indices=True)

    def halve(step: Array, edge: Array) -> Array:
        half = jnp.uint32(1) << (31 - step).astype(jnp.uint32)
        enough = jnp.sum(jnp.where(key <= edge + half - 1, weight, 0)) >= need
        return jnp.where(enough, edge, edge + half)

    edge = lax.fori_loop(0, 32, halve, jnp.uint32(0))
    tied = (key == edge) & (key != KEEP)
    below = (key < edge) & (need > 0)
    left = need - jnp.sum(jnp.where(below, weight, 0))
    tied_weight = jnp.where(tied, weight, 0)
    return below | (tied & (jnp.cumsum(tied_weight) - tied_weight < left))


def compact(mask: Array) -> Array:
    """Indices of the true entries in order, then N; i32[N] of bool[N]."""
    size = mask.shape[0]
    place = jnp.cumsum(mask.astype(jnp.int32)) - 1
    place = jnp.where(mask, place, size)
    return jnp.full(size, size, jnp.int32).at[place].set(iota(size), mode="drop")
