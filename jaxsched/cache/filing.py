"""Filing of states: an entry for each new point, a slot if it is worth one.

Shape letters: R rows, L tokens of the longest row, F points of a row, Q = R * F,
E entries, D block size, N blocks.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsched.cache.allocation import choose_snapshots, evict
from jaxsched.cache.blocks import free_blocks
from jaxsched.cache.entries import (
    Points,
    cap_paths,
    describe,
    enter,
    remember_last,
)
from jaxsched.cache.grouping import first_equal
from jaxsched.cache.hybrid_types import HybridCache, HybridConfig
from jaxsched.cache.keys import keep_bits, root_keys, token_terms
from jaxsched.cache.selection import compact
from jaxsched.cache.states import (
    taken_slots,
)
from jaxsched.core.config import NO_ID
from jaxsched.core.masking import count_before, iota

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Filed:
    """Where the states of a step have to be copied."""

    slot: Array  # i32[R, F]  snapshot slot; past the end: it is not to be copied
    is_known: Array  # bool[R, F]  the cache has (or has just got) a state there


def file_states(
    cache: HybridCache,
    tokens: Array,
    points: Array,
    next_use: Array,
    now: Array,
    config: HybridConfig,
) -> tuple[HybridCache, Filed]:
    """Files the states at points of the rows; see `commit.Step` for the arguments.

    A point that is known already costs no copy: its snapshot is refreshed. Points of
    private rows, and points that were never computed, are left out.
    """
    if config.num_snapshots == 0:
        slot = jnp.full(points.shape, config.num_slots, jnp.int32)
        return cache, Filed(slot=slot, is_known=jnp.zeros(points.shape, bool))

    def file(cache: HybridCache) -> tuple[HybridCache, Array, Array]:
        wanted = _points(cache, tokens, points, config)
        return _file(cache, tokens, wanted, next_use, now, config)

    def nothing(cache: HybridCache) -> tuple[HybridCache, Array, Array]:
        size = points.size
        none = jnp.full(size, config.num_slots, jnp.int32)
        return cache, none, jnp.zeros(size, bool)

    cache, slot, known = jax.lax.cond(jnp.any(points > 0), file, nothing, cache)
    return cache, Filed(
        slot=slot.reshape(points.shape), is_known=known.reshape(points.shape)
    )


def _points(
    cache: HybridCache, tokens: Array, points: Array, config: HybridConfig
) -> Points:
    rows, blocks = cache.rows, cache.blocks
    size, width = config.block_size, config.blocks_per_row
    num_points = points.shape[1]
    row = jnp.repeat(iota(rows.num_rows), num_points)
    depth = points.reshape(-1)
    number = jnp.clip((depth - 1) // size, 0, width - 1)
    # A block that is not full must be the one right behind the published ones.
    full = number < rows.num_indexed[row]
    reached = full | ((number == rows.num_indexed[row]) & (depth % size > 0))
    wanted = (depth > 0) & (depth <= rows.num_tokens[row]) & reached
    wanted &= rows.is_used[row] & ~rows.is_private[row]
    block = rows.block_tables[row, number]
    before = rows.block_tables[row, jnp.maximum(number - 1, 0)]
    before = jnp.where(number > 0, jnp.minimum(before, blocks.num_blocks - 1), 0)
    root = root_keys(rows.lora_id[row], rows.salt[row], bits=config.key_bits)
    base = jnp.where(number > 0, blocks.key[:, before], root)
    columns = number[:, None] * size + iota(size)[None, :]
    terms = token_terms(tokens[row[:, None], columns], columns)
    inside = columns < depth[:, None]
    key = base + jnp.sum(jnp.where(inside[None], terms, 0), axis=2, dtype=jnp.uint32)
    return Points(
        row=row,
        depth=depth,
        block=jnp.where(wanted, block, blocks.num_blocks),
        key=keep_bits(key, config.key_bits),
        wanted=wanted,
    )


def _file(
    cache: HybridCache,
    tokens: Array,
    points: Points,
    next_use: Array,
    now: Array,
    config: HybridConfig,
) -> tuple[HybridCache, Array, Array]:
    cache = _write_partial_blocks(cache, tokens, points, config)
    entry = _known_entry(cache, points)
    again = (entry >= 0) & cache.states.resident[jnp.maximum(entry, 0)]
    new = points.wanted & ~again
    twin = first_equal((points.key[0], points.key[1], points.depth), new)
    new &= twin == iota(new.shape[0])
    cache, entry = enter(cache, points, entry, new, now)
    cache = describe(cache, points, entry, new, again, next_use, now)
    pending = jnp.zeros(cache.states.num_entries, bool)
    pending = pending.at[jnp.where(new, entry, pending.shape[0])].set(True, mode="drop")
    victims = choose_snapshots(cache, pending, now, config)
    victims = cap_paths(cache, points, entry, new, victims, pending)
    cache = evict(cache, victims, now, config)
    stays = pending & ~victims.entries
    cache, slot_of = _give_slots(cache, stays, config)
    at = jnp.maximum(entry, 0)
    block = jnp.where(new & (slot_of[at] > 0), points.block, NO_ID)
    place = jnp.where(new, entry, cache.states.num_entries)
    states = cache.states
    states = states.replace(
        slot=states.slot.at[place].set(slot_of[at], mode="drop"),
        block=states.block.at[place].set(block, mode="drop"),
    )
    first = jnp.where(new, entry, entry[twin])
    cache = remember_last(cache.replace(states=states), points, first)
    slot = jnp.where(new & (slot_of[at] > 0), slot_of[at], config.num_slots)
    known = points.wanted & (first >= 0) & states.resident[jnp.maximum(first, 0)]
    return cache, slot, known


def _write_partial_blocks(
    cache: HybridCache, tokens: Array, points: Points, config: HybridConfig
) -> HybridCache:
    """Blocks that a state hangs on before they are full say what they hold."""
    rows, blocks, size = cache.rows, cache.blocks, config.block_size
    number = (points.depth - 1) // size
    open_ = points.wanted & (number >= rows.num_indexed[points.row])
    where = jnp.where(open_, points.block, blocks.num_blocks)
    number = jnp.maximum(number, 0)
    columns = number[:, None] * size + iota(size)[None, :]
    before = rows.block_tables[points.row, jnp.maximum(number - 1, 0)]
    parent = jnp.where(number > 0, before, NO_ID)
    return cache.replace(
        blocks=blocks.replace(
            tokens=blocks.tokens.at[where].set(
                tokens[points.row[:, None], columns], mode="drop"
            ),
            parent=blocks.parent.at[where].set(parent, mode="drop"),
            number=blocks.number.at[where].set(number, mode="drop"),
            lora_id=blocks.lora_id.at[where].set(rows.lora_id[points.row], mode="drop"),
            salt=blocks.salt.at[where].set(rows.salt[points.row], mode="drop"),
        )
    )


def _known_entry(cache: HybridCache, points: Points) -> Array:
    """The entry of each point that is already there, or NO_ID; i32[Q]."""
    states = cache.states
    same = jnp.all(points.key[:, :, None] == states.key[:, None, :], axis=0)
    same &= points.depth[:, None] == states.depth[None, :]
    same &= points.wanted[:, None]
    found = jnp.argmax(same, axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(same, axis=1), found, NO_ID)


def _give_slots(
    cache: HybridCache, stays: Array, config: HybridConfig
) -> tuple[HybridCache, Array]:
    """Slots, and pages in a shared arena, for entries; as many as there are; i32[E]."""
    states = cache.states
    first = 1 + config.num_rows
    taken = taken_slots(states, config.num_slots)
    usable = iota(config.num_slots) >= first
    usable &= iota(config.num_slots) < first + config.num_snapshots
    free = compact(usable & ~taken)
    used = jnp.sum(states.resident.astype(jnp.int32))
    room = jnp.maximum(cache.snapshot_limit - used, 0)
    pages = config.pages_per_snapshot
    if config.is_shared:
        open_ = free_blocks(cache.blocks, cache.hanging, cache.block_limit)
        room = jnp.minimum(room, jnp.sum(open_.astype(jnp.int32)) // pages)
    nth = count_before(stays)
    gets = stays & (nth < room)
    slot = free.at[jnp.where(gets, nth, config.num_slots)].get(
        mode="fill", fill_value=0
    )
    slot = jnp.where(gets, slot, 0)
    if not config.is_shared:
        return cache, slot
    # The n-th stored entry takes the n-th run of free pages.
    limit = config.num_rows * config.num_points * pages
    order = compact(open_)[: min(limit, config.num_blocks)]
    listed = jnp.zeros(states.num_entries + 1, jnp.int32)
    listed = listed.at[jnp.where(gets, nth, states.num_entries)].set(slot)
    place = iota(order.shape[0])
    count = jnp.sum(gets.astype(jnp.int32)) * pages
    used_now = place < count
    of_slot = listed[jnp.minimum(place // pages, states.num_entries)]
    block = jnp.where(used_now, order, config.num_blocks)
    row = jnp.where(used_now, of_slot, config.num_slots)
    return (
        cache.replace(
            blocks=cache.blocks.replace(
                state_slot=cache.blocks.state_slot.at[block].set(of_slot, mode="drop")
            ),
            slot_pages=cache.slot_pages.at[row, place % pages].set(block, mode="drop"),
        ),
        slot,
    )
