"""The prefix index: a set of block keys in buckets, two choices, a fixed width.

An entry is a block id and the second word of its key as a fingerprint. A key may lie
in either of two buckets and is put into the emptier one; at half load practically
nothing is refused (two choices: Azar et al. 1994). Deleting writes "empty", so there
are no tombstones and nothing is ever rebuilt. A lookup reads both buckets whole.

Shape letters: T buckets (a power of two), W ways, N keys.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsched.cache.grouping import rank_in_group
from jaxsched.core.config import NO_ID

Array = jax.Array

WAYS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefixIndex:
    """Which block holds the key; places are numbered bucket * W + way."""

    block: Array  # i32[T*W]  NO_ID: empty
    fingerprint: Array  # u32[T*W]


def empty_index(num_blocks: int, ways: int = WAYS, load: float = 0.5) -> PrefixIndex:
    """An index with room for so many blocks at the given load."""
    buckets = 1
    while buckets * ways * load < num_blocks:
        buckets *= 2
    size = buckets * ways
    return PrefixIndex(
        block=jnp.full(size, NO_ID, jnp.int32),
        fingerprint=jnp.zeros(size, jnp.uint32),
    )


def find(index: PrefixIndex, keys: Array, ways: int = WAYS) -> Array:
    """Candidate block of each key, NO_ID where there is none; i32[N] of u32[2, N].

    A candidate still has to be checked by its tokens. Of several, the largest id.
    """
    found = jnp.full(keys.shape[1:], NO_ID, jnp.int32)
    for bucket in _buckets(index, keys, ways):
        block, mark = _row(index, bucket, ways)
        hit = (block >= 0) & (mark == keys[1][..., None])
        found = jnp.maximum(found, jnp.max(jnp.where(hit, block, NO_ID), axis=-1))
    return found


def find_room(index: PrefixIndex, keys: Array, mask: Array, ways: int = WAYS) -> Array:
    """A place of its own for each masked key, NO_ID where both buckets are full.

    Keys of one call that choose the same bucket take its empty ways in turn.

    Returns:
      i32[N].
    """
    first, second = _buckets(index, keys, ways)
    room = [jnp.sum(_row(index, b, ways)[0] < 0, axis=-1) for b in (first, second)]
    bucket = jnp.where(room[0] >= room[1], first, second)
    rank = rank_in_group(bucket, mask)
    empty = _row(index, bucket, ways)[0] < 0
    order = jnp.cumsum(empty.astype(jnp.int32), axis=-1)
    chosen = empty & (order == rank[:, None] + 1)
    way = jnp.argmax(chosen, axis=-1).astype(jnp.int32)
    fits = mask & jnp.any(chosen, axis=-1)
    return jnp.where(fits, bucket * ways + way, NO_ID)


def put(index: PrefixIndex, place: Array, keys: Array, block: Array) -> PrefixIndex:
    """Writes entries at i32[N] places; a place past the end writes nothing."""
    return PrefixIndex(
        block=index.block.at[place].set(block, mode="drop"),
        fingerprint=index.fingerprint.at[place].set(keys[1], mode="drop"),
    )


def clear(index: PrefixIndex, place: Array) -> PrefixIndex:
    """Empties i32[N] places; a place past the end empties nothing."""
    return dataclasses.replace(
        index, block=index.block.at[place].set(NO_ID, mode="drop")
    )


def _buckets(index: PrefixIndex, keys: Array, ways: int) -> tuple[Array, Array]:
    """The two buckets of each key, i32[N]; both from the first word."""
    mask = jnp.uint32(index.block.shape[0] // ways - 1)
    x = keys[0]
    y = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x45D9F3B)
    y = y ^ (y >> jnp.uint32(15))
    return (x & mask).astype(jnp.int32), (y & mask).astype(jnp.int32)


def _row(index: PrefixIndex, bucket: Array, ways: int) -> tuple[Array, Array]:
    """Blocks and fingerprints of whole buckets, [N, W]."""
    buckets = (index.block.shape[0] // ways, ways)
    return (
        index.block.reshape(buckets)[bucket],
        index.fingerprint.reshape(buckets)[bucket],
    )
