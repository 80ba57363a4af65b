"""Commit: publish what a step has computed, and file the states that it stood on.

Blocks that have become full enter the index; a block that is there already is
*adopted*: the row's table is rewritten to it and the row's own copy becomes free. So a
row always holds the one block that its next block names as its parent, which is what
makes evicting in order of worth and depth safe.

Shape letters: R rows, L tokens of the longest row, F points of a row, K completed
blocks of a call, D block size, N blocks.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsched.cache.filing import Filed, file_states
from jaxsched.cache.grouping import first_equal
from jaxsched.cache.hybrid_types import HybridCache, HybridConfig
from jaxsched.cache.index import find, find_room, put
from jaxsched.cache.keys import keep_bits, root_keys, token_terms
from jaxsched.cache.prefix import seen_mark, seen_place
from jaxsched.cache.unlimited import file_unlimited
from jaxsched.core.config import NO_ID
from jaxsched.core.masking import iota

Array = jax.Array

__all__ = ("Filed", "Step", "commit")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """What a step has done, for all rows."""

    tokens: Array  # i32[R, L]  prompts and what followed; L = B * block_size
    num_tokens: Array  # i32[R]  computed and written now; never less than before
    points: Array  # i32[R, F]  depths whose states are there to be filed, or NO_ID
    next_use: Array  # i32[R]  ms of the next use of its answer, if a simulator knows


@dataclasses.dataclass(frozen=True)
class _Entries:
    """Completed blocks, row by row; all i32[K] unless said."""

    row: Array
    number: Array  # in the row's prompt
    used: Array  # bool[K]
    is_first: Array  # bool[K]  of its row
    start: Array  # index of its row's first entry
    own: Array  # the block the row computed
    tokens: Array  # i32[K, D]
    key: Array  # u32[2, K]


def commit(
    cache: HybridCache, step: Step, now: Array, config: HybridConfig
) -> tuple[HybridCache, Filed]:
    """Publishes the blocks that are full and files states at the given points.

    A row whose chain cannot be published (a full bucket, a collision of keys) goes on
    privately: it runs as before and publishes nothing more.

    Args:
      cache: the tables.
      step: what was computed. Blocks above `max_commit_blocks` in one call would be
        lost, so configure it from the step's token budget.
      now: i32[], milliseconds.
      config: static.

    Returns:
      The cache and where each state has to be copied.
    """
    return file_points(publish_blocks(cache, step, config), step, now, config)


def file_points(
    cache: HybridCache, step: Step, now: Array, config: HybridConfig
) -> tuple[HybridCache, Filed]:
    """The second half of `commit`, once all full blocks are published."""
    rows = cache.rows
    cache = cache.replace(
        rows=rows.replace(
            num_tokens=jnp.where(
                rows.is_used,
                jnp.maximum(step.num_tokens, rows.num_tokens),
                rows.num_tokens,
            )
        )
    )
    if config.is_unlimited:
        cache, slot, known = file_unlimited(cache, step.tokens, step.points, config)
        return cache, Filed(slot=slot, is_known=known)
    return file_states(cache, step.tokens, step.points, step.next_use, now, config)


def publish_blocks(cache: HybridCache, step: Step, config: HybridConfig) -> HybridCache:
    """The first half of `commit`: the next `max_commit_blocks` full blocks by rows.

    Where a step may fill more, call it while `num_unpublished` says so.
    """
    cache = cache.replace(tick=cache.tick + 1)
    entries = _completed(cache, step, config)
    return jax.lax.cond(
        jnp.any(entries.used),
        lambda cache: _publish(cache, entries, config),
        lambda cache: cache,
        cache,
    )


def num_unpublished(
    cache: HybridCache, num_tokens: Array, config: HybridConfig
) -> Array:
    """Full blocks of each row that the index does not know yet; i32[R].

    Args:
      cache: the tables.
      num_tokens: i32[R], computed and written now.
      config: static.
    """
    rows = cache.rows
    count = jnp.maximum(num_tokens // config.block_size - rows.num_indexed, 0)
    return jnp.where(rows.is_used & ~rows.is_private, count, 0)


def _completed(cache: HybridCache, step: Step, config: HybridConfig) -> _Entries:
    """The blocks that this step has filled, flattened by rows."""
    rows, size = cache.rows, config.block_size
    count = num_unpublished(cache, step.num_tokens, config)
    ends = jnp.cumsum(count)
    at = iota(config.max_commit_blocks)
    row = jnp.sum((ends[None, :] <= at[:, None]).astype(jnp.int32), axis=1)
    used = row < rows.num_rows
    row = jnp.minimum(row, rows.num_rows - 1)
    start = (ends - count)[row]
    number = jnp.where(used, rows.num_indexed[row] + at - start, 0)
    own = rows.block_tables[row, number]
    columns = number[:, None] * size + iota(size)[None, :]
    tokens = step.tokens[row[:, None], columns]
    totals = jnp.sum(token_terms(tokens, columns), axis=-1, dtype=jnp.uint32)
    totals = jnp.where(used[None, :], totals, jnp.uint32(0))
    sums = jnp.cumsum(totals, axis=1)
    base = _key_before(cache, config)[:, row]
    key = base + sums - (sums - totals)[:, jnp.minimum(start, at[-1])]
    return _Entries(
        row=row,
        number=number,
        used=used,
        is_first=used & (at == start),
        start=jnp.minimum(start, at[-1]),
        own=own,
        tokens=tokens,
        key=keep_bits(key, config.key_bits),
    )


def _key_before(cache: HybridCache, config: HybridConfig) -> Array:
    """Key of what each row has published, u32[2, R]."""
    rows = cache.rows
    last = last_published(cache)
    root = root_keys(rows.lora_id, rows.salt, bits=config.key_bits)
    return jnp.where(last >= 0, cache.blocks.key[:, jnp.maximum(last, 0)], root)


def last_published(cache: HybridCache) -> Array:
    """The last block of each row that the index knows, or NO_ID; i32[R]."""
    rows = cache.rows
    at = jnp.maximum(rows.num_indexed - 1, 0)
    block = rows.block_tables[iota(rows.num_rows), at]
    return jnp.where(rows.num_indexed > 0, block, NO_ID)


def _publish(
    cache: HybridCache, entries: _Entries, config: HybridConfig
) -> HybridCache:
    blocks, used = cache.blocks, entries.used
    size = blocks.num_blocks
    found = jnp.where(used, find(cache.index, entries.key), NO_ID)
    twin = first_equal((entries.key[0], entries.key[1]), used)
    canonical = jnp.where(found >= 0, found, entries.own[twin])
    before = jnp.roll(canonical, 1)
    parent = jnp.where(entries.is_first, last_published(cache)[entries.row], before)
    is_twin = used & (found < 0) & (twin != iota(twin.shape[0]))
    leads = used & (found < 0) & ~is_twin
    verified = jnp.where(
        found >= 0,
        _same_as_block(cache, entries, found, parent),
        _same_as_entry(cache, entries, twin, parent),
    )
    place = find_room(cache.index, entries.key, leads)
    good = jnp.where(leads, place >= 0, verified & (~is_twin | (place[twin] >= 0)))
    chained = used & _unbroken(good | ~used, entries)
    inserted = leads & chained
    # Only a collision can leave a twin without the entry it leans on; then nothing of
    # this call is published, or a block could be indexed under one that is not.
    torn = jnp.any(chained & is_twin & ~inserted[twin])
    chained, inserted = chained & ~torn, inserted & ~torn

    where = jnp.where(inserted, entries.own, size)
    at_place = jnp.where(inserted, place, cache.index.block.shape[0])
    row = entries.row
    blocks = blocks.replace(
        tokens=blocks.tokens.at[where].set(entries.tokens, mode="drop"),
        parent=blocks.parent.at[where].set(parent, mode="drop"),
        number=blocks.number.at[where].set(entries.number, mode="drop"),
        key=blocks.key.at[:, where].set(entries.key, mode="drop"),
        lora_id=blocks.lora_id.at[where].set(cache.rows.lora_id[row], mode="drop"),
        salt=blocks.salt.at[where].set(cache.rows.salt[row], mode="drop"),
        place=blocks.place.at[where].set(place, mode="drop"),
    )
    used_now = jnp.where(chained, canonical, size)
    blocks = blocks.replace(
        last_used=blocks.last_used.at[used_now].set(cache.tick, mode="drop")
    )
    seen = cache.seen
    if not config.is_unlimited:  # there what was seen is still there
        at = seen_place(entries.key, seen.shape[0])
        at = jnp.where(inserted, at, seen.shape[0])
        seen = seen.at[at].set(seen_mark(entries.key), mode="drop")
    cache = cache.replace(
        blocks=blocks,
        index=put(cache.index, at_place, entries.key, entries.own),
        seen=seen,
    )
    return _adopt(cache, entries, canonical, chained, config)


def _same_as_block(
    cache: HybridCache, entries: _Entries, block: Array, parent: Array
) -> Array:
    """Whether entries are what indexed blocks hold, bool[K]."""
    blocks, at = cache.blocks, jnp.maximum(block, 0)
    same = jnp.all(blocks.tokens[at] == entries.tokens, axis=1)
    root = (blocks.lora_id[at] == cache.rows.lora_id[entries.row]) & (
        blocks.salt[at] == cache.rows.salt[entries.row]
    )
    return same & root & (blocks.parent[at] == parent)


def _same_as_entry(
    cache: HybridCache, entries: _Entries, other: Array, parent: Array
) -> Array:
    """Whether entries are what another row has just computed, bool[K]."""
    rows = cache.rows
    same = jnp.all(entries.tokens[other] == entries.tokens, axis=1)
    one, two = entries.row, entries.row[other]
    root = (rows.lora_id[one] == rows.lora_id[two]) & (rows.salt[one] == rows.salt[two])
    return same & root & (parent[other] == parent)


def _unbroken(good: Array, entries: _Entries) -> Array:
    """Whether everything of its row up to and with an entry is good, bool[K]."""
    bad = jnp.cumsum((~good).astype(jnp.int32))
    before = (bad - (~good).astype(jnp.int32))[entries.start]
    return bad == before


def _moved(block: Array, given: Array, taken: Array, num_blocks: Array) -> Array:
    """Blocks of snapshots, i32[E]: what hangs on a copy hangs on the indexed block.

    Both have the same beginning.
    """
    to = iota(num_blocks).at[given].set(taken, mode="drop")
    return jnp.where(block >= 0, to[jnp.maximum(block, 0)], block)


def _adopt(
    cache: HybridCache,
    entries: _Entries,
    canonical: Array,
    chained: Array,
    config: HybridConfig,
) -> HybridCache:
    """Rewrites tables to the indexed blocks and lets go of the rows' own copies."""
    blocks, rows, states = cache.blocks, cache.rows, cache.states
    size = blocks.num_blocks
    moves = chained & (canonical != entries.own)
    given = jnp.where(moves, entries.own, size)
    taken = jnp.where(moves, canonical, size)
    refs = blocks.num_refs.at[given].add(-1, mode="drop").at[taken].add(1, mode="drop")
    row = jnp.where(moves, entries.row, rows.num_rows)
    block = states.block
    if not config.is_unlimited:  # there they stay, and so does the copy
        block = jax.lax.cond(
            jnp.any(moves), lambda: _moved(block, given, taken, size), lambda: block
        )
    done = jnp.zeros(rows.num_rows, jnp.int32)
    done = done.at[entries.row].add(chained.astype(jnp.int32))
    broken = jnp.zeros(rows.num_rows, bool)
    broken = broken.at[entries.row].max(entries.used & ~chained)
    return cache.replace(
        blocks=blocks.replace(num_refs=refs),
        states=states.replace(block=block),
        rows=rows.replace(
            block_tables=rows.block_tables.at[row, entries.number].set(
                canonical, mode="drop"
            ),
            num_indexed=rows.num_indexed + done,
            is_private=rows.is_private | broken,
        ),
    )
