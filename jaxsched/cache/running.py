"""Rows that run: more room, the end of a row, a copy of a row.

Shape letters: A listed rows, R rows, B blocks of a row, N blocks.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsched.cache.allocation import (
    joined_tables,
    make_room_if_short,
    running_fits,
    take_free,
)
from jaxsched.cache.blocks import hold, let_go, write_tables
from jaxsched.cache.hybrid_types import HybridCache, HybridConfig
from jaxsched.cache.reserving import Placed
from jaxsched.cache.states import live_slot
from jaxsched.core.config import MAX_COUNT, NO_ID
from jaxsched.core.masking import iota

Array = jax.Array


def grow(
    cache: HybridCache, target: Array, now: Array, config: HybridConfig
) -> tuple[HybridCache, Array]:
    """Makes room for running rows up to `target` tokens, in row order, each whole.

    At most `max_commit_blocks` blocks a call; pays nothing when no row needs one.

    Args:
      cache: the tables.
      target: i32[R]; rows that need nothing may give 0.
      now: i32[], milliseconds.
      config: static.

    Returns:
      The cache and bool[R]: rows that have room for their target.
    """
    size, width = config.block_size, config.blocks_per_row
    rows = cache.rows
    needed = (target + size - 1) // size
    new = jnp.where(rows.is_used, jnp.maximum(needed - rows.num_blocks, 0), 0)
    possible = needed <= jnp.minimum(width, cache.block_limit)
    new = jnp.where(possible, new, 0)
    fits = jnp.cumsum(new) <= config.max_commit_blocks
    fits &= running_fits(cache, jnp.where(fits, new, 0), config)
    granted = rows.is_used & possible & fits
    new = jnp.where(granted, new, 0)

    def take(cache: HybridCache) -> HybridCache:
        cache = cache.replace(tick=cache.tick + 1)
        none = jnp.full(1, MAX_COUNT, jnp.int32)
        cache = make_room_if_short(cache, jnp.sum(new), none, none, now, config)
        columns = min(width, config.max_commit_blocks)
        cache, ids = take_free(cache, new, columns, config)
        held = iota(columns)[None, :] < new[:, None]
        row = jnp.where(new > 0, iota(rows.num_rows), rows.num_rows)
        return cache.replace(
            blocks=hold(cache.blocks, ids, held, cache.tick),
            rows=write_tables(cache.rows, row, cache.rows.num_blocks, new, ids),
        )

    cache = jax.lax.cond(jnp.any(new > 0), take, lambda cache: cache, cache)
    return cache, granted


def release(cache: HybridCache, rows: Array, config: HybridConfig) -> HybridCache:
    """Lets go of all that the listed rows hold; what they committed stays cached.

    Finish, preempt and cancel are all this: blocks that were not committed are free at
    once, the others can be evicted.

    Args:
      cache: the tables.
      rows: i32[A], all different; NO_ID: nothing.
      config: static.
    """
    table, tick = cache.rows, cache.tick + 1
    used = (rows >= 0) & table.is_used[jnp.maximum(rows, 0)]
    at = jnp.maximum(rows, 0)
    ids = table.block_tables[at]
    held = used[:, None] & (iota(ids.shape[1])[None, :] < table.num_blocks[at][:, None])
    row = jnp.where(used, rows, table.num_rows)
    cleared = {
        name: getattr(table, name).at[row].set(value, mode="drop")
        for name, value in (
            ("block_tables", config.num_blocks),
            ("num_blocks", 0),
            ("num_tokens", 0),
            ("num_indexed", 0),
            ("num_prompt_tokens", 0),
            ("is_used", False),
            ("last_entry", NO_ID),
            ("past_entry", NO_ID),
        )
    }
    return cache.replace(
        blocks=let_go(cache.blocks, ids, held, tick),
        rows=table.replace(**cleared),
        tick=tick,
    )


def fork(
    cache: HybridCache,
    source: Array,
    target: Array,
    num_tokens: Array,
    now: Array,
    config: HybridConfig,
) -> tuple[HybridCache, Placed]:
    """Lets new rows go on from where running rows stand, in order, each whole.

    Full blocks are shared, the last one and the state are copied.

    Args:
      cache: the tables.
      source: i32[A], used rows.
      target: i32[A], unused rows, all different; NO_ID: nothing.
      num_tokens: i32[A], tokens to make room for.
      now: i32[], milliseconds.
      config: static.
    """
    size, width = config.block_size, config.blocks_per_row
    table, past = cache.rows, config.num_blocks
    at = jnp.maximum(source, 0)
    done = table.num_tokens[at]
    shared, offset = done // size, done % size
    needed = (jnp.maximum(num_tokens, done + 1) + size - 1) // size
    wanted = (target >= 0) & (source >= 0) & table.is_used[at]
    wanted &= (needed <= width) & (needed <= cache.block_limit)
    new = jnp.where(wanted, needed - shared, 0)
    granted = wanted & running_fits(cache, new, config)
    new = jnp.where(granted, new, 0)
    cache = cache.replace(tick=cache.tick + 1)
    none = jnp.full(1, MAX_COUNT, jnp.int32)
    cache = make_room_if_short(cache, jnp.sum(new), none, none, now, config)
    cache, ids = take_free(cache, new, width, config)
    old = table.block_tables[at]
    row = jnp.where(granted, target, table.num_rows)
    ids_table, held = joined_tables(old, ids, shared, new, past)
    fields = {
        field.name: getattr(table, field.name)
        .at[row]
        .set(getattr(table, field.name)[at], mode="drop")
        for field in dataclasses.fields(table)
    }
    fields["block_tables"] = table.block_tables.at[row].set(ids_table, mode="drop")
    fields["num_blocks"] = table.num_blocks.at[row].set(needed, mode="drop")
    column = iota(width)[None, :]
    held |= granted[:, None] & (column < shared[:, None])
    copied = granted & (offset > 0)
    tail = old[iota(at.shape[0]), jnp.minimum(shared, width - 1)]
    placed = Placed(
        granted=granted,
        num_cached_tokens=jnp.where(granted, done, 0),
        block_source=jnp.where(copied, tail, past),
        block_target=jnp.where(copied, ids[:, 0], past),
        num_copied_tokens=jnp.where(copied, offset, 0),
        state_source=jnp.where(granted, live_slot(source), 0),
        state_target=jnp.where(granted, live_slot(target), config.num_slots),
        zero_target=jnp.full_like(row, config.num_slots),
    )
    cache = cache.replace(
        blocks=hold(cache.blocks, ids_table, held, cache.tick),
        rows=table.replace(**fields),
    )
    return cache, placed
