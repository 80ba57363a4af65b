"""Making room: victims are chosen only when something is short, all in one selection.

Shape letters: N blocks, E entries.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.cache.blocks import free_blocks, take_slices
from jaxsched.cache.eviction import (
    Costs,
    Eviction,
    Worth,
    block_worth,
    leaf_bound,
    state_scores,
    state_worth,
)
from jaxsched.cache.ghosts import record_evictions
from jaxsched.cache.hybrid_types import HybridCache, HybridConfig
from jaxsched.cache.index import clear
from jaxsched.cache.selection import KEEP, compact, order_keys, recency, smallest
from jaxsched.core.config import NO_ID
from jaxsched.core.masking import iota

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Victims:
    """What goes: bool[N] blocks and bool[E] entries."""

    blocks: Array
    entries: Array


def num_free_blocks(cache: HybridCache) -> Array:
    """Blocks that can be handed out without evicting anything; i32[]."""
    free = free_blocks(cache.blocks, cache.hanging, cache.block_limit)
    return jnp.sum(free.astype(jnp.int32))


def num_available_blocks(cache: HybridCache) -> Array:
    """Blocks that no row holds: free, or evictable with what lies in them; i32[]."""
    idle = cache.blocks.num_refs == 0
    idle &= iota(cache.blocks.num_blocks) < cache.block_limit
    return jnp.sum(idle.astype(jnp.int32))


def num_never_used(cache: HybridCache, config: HybridConfig) -> Array:
    """Blocks at the end of the pool that no row has ever held: free for sure; i32[].

    Counting all free blocks takes a pass over the pool; where these suffice, nobody
    needs to. 0 in a shared arena, whose snapshots take blocks from anywhere.
    """
    if config.is_shared:
        return jnp.zeros_like(cache.num_handed_out)
    return jnp.maximum(cache.block_limit - cache.num_handed_out, 0)


def running_fits(cache: HybridCache, cost: Array, config: HybridConfig) -> Array:
    """Whether each and all before it find room, bool[A] of i32[A] blocks."""
    total = jnp.cumsum(cost)
    if config.is_unlimited:
        return total <= num_never_used(cache, config)
    room = lax.cond(
        total[-1] <= num_never_used(cache, config),
        lambda: total[-1],
        lambda: num_available_blocks(cache),
    )
    return total <= room


def make_room(
    cache: HybridCache,
    need: Array,
    keep_block: Array,
    keep_entry: Array,
    now: Array,
    config: HybridConfig,
) -> HybridCache:
    """Evicts until so many blocks are free, or all that can go is gone.

    Args:
      cache: the tables.
      need: i32[], free blocks wanted.
      keep_block: bool[N], idle blocks that must stay.
      keep_entry: bool[E], snapshots that must stay.
      now: i32[], milliseconds.
      config: static.
    """
    short = need - num_free_blocks(cache)

    def choose() -> tuple[Array, Array]:
        here = cache.states.resident
        pages = config.pages_per_snapshot
        blocks, entries = _orders(cache, here, keep_block, keep_entry, now, config)
        if not config.is_shared:
            one = jnp.ones(blocks.shape[0], jnp.int32)
            gone = smallest(blocks, one, short, config.selection)
            return gone, jnp.zeros(entries.shape[0], bool)
        weight = jnp.append(
            jnp.full(entries.shape[0], pages, jnp.int32),
            jnp.ones(blocks.shape[0], jnp.int32),
        )
        gone = smallest(jnp.append(entries, blocks), weight, short, config.selection)
        return gone[entries.shape[0] :], gone[: entries.shape[0]]

    def nothing() -> tuple[Array, Array]:
        return (
            jnp.zeros(cache.blocks.num_blocks, bool),
            jnp.zeros(cache.states.num_entries, bool),
        )

    gone = lax.cond(short > 0, choose, nothing)
    return evict(cache, Victims(*gone), now, config)


def make_room_if_short(
    cache: HybridCache,
    need: Array,
    keep_block: Array,
    keep_entry: Array,
    now: Array,
    config: HybridConfig,
) -> HybridCache:
    """`make_room` that looks at the pool only if blocks never used do not suffice.

    Args:
      cache: the tables.
      need: i32[].
      keep_block: i32[A], idle blocks that must stay; past the end: none.
      keep_entry: i32[A], the same for snapshots.
      now: i32[], milliseconds.
      config: static.
    """
    if config.is_unlimited:
        return cache

    def room(cache: HybridCache) -> HybridCache:
        blocks = jnp.zeros(cache.blocks.num_blocks, bool)
        entries = jnp.zeros(cache.states.num_entries, bool)
        blocks = blocks.at[keep_block].set(True, mode="drop")
        entries = entries.at[keep_entry].set(True, mode="drop")
        return make_room(cache, need, blocks, entries, now, config)

    enough = need <= num_never_used(cache, config)
    return lax.cond(enough, lambda cache: cache, room, cache)


def choose_snapshots(
    cache: HybridCache,
    pending: Array,
    now: Array,
    config: HybridConfig,
) -> Victims:
    """What goes so that pending snapshots can be stored; they compete as well.

    A pending one that is itself worth least is among the victims: not stored.

    Args:
      cache: with entries for the pending ones, not resident yet.
      pending: bool[E].
      now: i32[], milliseconds.
      config: static.
    """
    states = cache.states
    here = states.resident | pending
    count = jnp.sum(pending.astype(jnp.int32))
    nothing = jnp.zeros(cache.blocks.num_blocks, bool)
    if not config.is_shared:
        used = jnp.sum(states.resident.astype(jnp.int32))
        short = used + count - cache.snapshot_limit
        worth = _entry_worth(cache, here, now, config.slot_costs, config)
        keys = _entry_keys(cache, worth.state, here, config)
        one = jnp.ones(states.num_entries, jnp.int32)
        return Victims(nothing, smallest(keys, one, short, config.selection))
    pages = config.pages_per_snapshot
    used = jnp.sum(states.resident.astype(jnp.int32))
    excess = (used + count - cache.snapshot_limit) * pages
    short = jnp.maximum(count * pages - num_free_blocks(cache), excess)
    none = jnp.zeros(states.num_entries, bool)
    blocks, entries = _orders(cache, here, nothing, none, now, config)
    # Over the limit of slots only states help: then no block is taken at all.
    only_states = excess > count * pages - num_free_blocks(cache)
    weight = jnp.append(
        jnp.full(states.num_entries, pages, jnp.int32),
        jnp.where(only_states, 0, jnp.ones(blocks.shape[0], jnp.int32)),
    )
    blocks = jnp.where(only_states, KEEP, blocks)
    gone = smallest(jnp.append(entries, blocks), weight, short, config.selection)
    return Victims(gone[states.num_entries :], gone[: states.num_entries])


def _entry_worth(
    cache: HybridCache, here: Array, now: Array, costs: Costs, config: HybridConfig
) -> Worth:
    worth = state_worth(
        config.eviction,
        cache.states,
        here,
        cache.stats,
        tick=cache.tick,
        now=now,
        costs=costs,
        bits=config.worth_bits,
    )
    if config.eviction == Eviction.LRU_LEAVES:
        own = recency(cache.tick - cache.blocks.last_used, config.worth_bits)
        worth = Worth(leaf_bound(cache.states, worth.state, own), worth.hold)
    return worth


def _entry_keys(
    cache: HybridCache, worth: Array, evictable: Array, config: HybridConfig
) -> Array:
    number = (cache.states.depth - 1) // config.block_size
    number = jnp.clip(number, 0, config.blocks_per_row)
    return order_keys(worth, number, False, evictable, config.blocks_per_row)


def _orders(
    cache: HybridCache,
    here: Array,
    keep_block: Array,
    keep_entry: Array,
    now: Array,
    config: HybridConfig,
) -> tuple[Array, Array]:
    """Keys of blocks u32[N], keys of entries u32[E]."""
    blocks, bits = cache.blocks, config.worth_bits
    worth = _entry_worth(cache, here, now, config.costs, config)
    in_tree = cache.in_tree
    of_block = block_worth(
        config.eviction,
        blocks,
        cache.states,
        worth.hold,
        here,
        in_tree,
        tick=cache.tick,
        bits=bits,
        rounds=config.path_rounds,
    )
    evictable = in_tree & (blocks.num_refs == 0) & ~keep_block
    width = config.blocks_per_row
    block_keys = order_keys(of_block, blocks.number, True, evictable, width)
    return block_keys, _entry_keys(cache, worth.state, here & ~keep_entry, config)


def evict(
    cache: HybridCache, victims: Victims, now: Array, config: HybridConfig
) -> HybridCache:
    """Takes blocks out of the index and slots from their snapshots.

    A snapshot whose block goes, goes with it; its entry stays as a ghost.
    """
    return lax.cond(
        jnp.any(victims.entries) | jnp.any(victims.blocks),
        lambda cache: _evict(cache, victims, now, config),
        lambda cache: cache,
        cache,
    )


def _evict(
    cache: HybridCache, victims: Victims, now: Array, config: HybridConfig
) -> HybridCache:
    blocks, states = cache.blocks, cache.states
    lost = victims.blocks[jnp.maximum(states.block, 0)] & states.resident
    gone = (victims.entries | lost) & states.resident
    stats = cache.stats
    if config.eviction == Eviction.AGE_HISTOGRAM:
        stats = record_evictions(stats, states, gone, now)
    if config.eviction == Eviction.GREEDY_DUAL:
        costs = config.costs if config.is_shared else config.slot_costs
        policy, here = config.eviction, states.resident
        score, _ = state_scores(policy, states, here, stats, now, costs)
        clock = jnp.max(jnp.where(gone, score, 0), initial=0)
        stats = dataclasses.replace(
            stats, inflation=jnp.maximum(stats.inflation, clock)
        )
    place = jnp.where(victims.blocks, blocks.place, cache.index.block.shape[0])
    place = jnp.where(place < 0, cache.index.block.shape[0], place)
    state_slot = blocks.state_slot
    if config.is_shared:
        slot = jnp.where(gone, states.slot, config.num_slots)
        dead = jnp.zeros(config.num_slots, bool).at[slot].set(True, mode="drop")
        state_slot = jnp.where(dead[state_slot], 0, state_slot)
    return cache.replace(
        num_evicted_blocks=cache.num_evicted_blocks
        + jnp.sum(victims.blocks.astype(jnp.int32)),
        num_evicted_snapshots=cache.num_evicted_snapshots
        + jnp.sum(gone.astype(jnp.int32)),
        index=clear(cache.index, place),
        blocks=blocks.replace(
            place=jnp.where(victims.blocks, NO_ID, blocks.place),
            parent=jnp.where(victims.blocks, NO_ID, blocks.parent),
            state_slot=state_slot,
        ),
        states=states.replace(
            slot=jnp.where(gone, 0, states.slot),
            block=jnp.where(gone, NO_ID, states.block),
        ),
        stats=stats,
    )


def take_free(
    cache: HybridCache, count: Array, width: int, config: HybridConfig
) -> tuple[HybridCache, Array]:
    """Free blocks for each listed row, i32[A, width], past the end behind them."""
    total = jnp.sum(count)

    def never_used() -> Array:
        start = cache.num_handed_out + jnp.cumsum(count) - count
        ids = start[:, None] + iota(width)[None, :]
        return jnp.where(iota(width)[None, :] < count[:, None], ids, past)

    def anywhere() -> Array:
        free = free_blocks(cache.blocks, cache.hanging, cache.block_limit)
        return take_slices(compact(free), count, width)

    past = cache.blocks.num_blocks
    if config.is_unlimited:
        ids = never_used()
    else:
        ids = lax.cond(total <= num_never_used(cache, config), never_used, anywhere)
    highest = jnp.max(jnp.where(ids < past, ids, NO_ID), initial=NO_ID)
    handed_out = jnp.maximum(cache.num_handed_out, highest + 1)
    return cache.replace(num_handed_out=handed_out), ids


def joined_tables(
    old: Array, new: Array, shared: Array, count: Array, past: int
) -> tuple[Array, Array]:
    """Tables of shared blocks, then new ones, then none; and which are new."""
    width = old.shape[1]
    at = iota(width)[None, :] - shared[:, None]
    moved = jnp.take_along_axis(new, jnp.clip(at, 0, width - 1), axis=1)
    held = (at >= 0) & (at < count[:, None])
    return jnp.where(at < 0, old, jnp.where(held, moved, past)), held
