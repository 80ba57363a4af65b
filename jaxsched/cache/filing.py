"""Filing of states: an entry for each new point, a slot if it is worth one.

Shape letters: R rows, L tokens of the longest row, F points of a row, Q = R * F,
E entries, D block size, N blocks.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsched.cache.allocation import Victims, choose_snapshots, evict
from jaxsched.cache.blocks import free_blocks
from jaxsched.cache.eviction import TREE_ROUNDS
from jaxsched.cache.ghosts import record_drops
from jaxsched.cache.grouping import first_equal
from jaxsched.cache.hybrid_types import HybridCache, HybridConfig
from jaxsched.cache.keys import keep_bits, root_keys, token_terms
from jaxsched.cache.selection import compact
from jaxsched.cache.states import (
    SnapshotKind,
    forget,
    nearest_ancestors,
    taken_slots,
)
from jaxsched.core.config import MAX_COUNT, NO_ID
from jaxsched.core.masking import count_before, iota

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Filed:
    """Where the states of a step have to be copied."""

    slot: Array  # i32[R, F]  snapshot slot; past the end: it is not to be copied
    is_known: Array  # bool[R, F]  the cache has (or has just got) a state there


@dataclasses.dataclass(frozen=True)
class _Points:
    """Points of all rows in one list; i32[Q] unless said."""

    row: Array
    depth: Array
    block: Array
    key: Array  # u32[2, Q]
    wanted: Array  # bool[Q]


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
) -> _Points:
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
    return _Points(
        row=row,
        depth=depth,
        block=jnp.where(wanted, block, blocks.num_blocks),
        key=keep_bits(key, config.key_bits),
        wanted=wanted,
    )


def _file(
    cache: HybridCache,
    tokens: Array,
    points: _Points,
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
    cache, entry = _enter(cache, points, entry, new, now)
    cache = _describe(cache, points, entry, new, again, next_use, now)
    pending = jnp.zeros(cache.states.num_entries, bool)
    pending = pending.at[jnp.where(new, entry, pending.shape[0])].set(True, mode="drop")
    victims = choose_snapshots(cache, pending, now, config)
    victims = _with_path_limit(cache, points, entry, new, victims, pending)
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
    cache = cache.replace(states=states)
    slot = jnp.where(new & (slot_of[at] > 0), slot_of[at], config.num_slots)
    first = jnp.where(new, entry, entry[twin])
    known = points.wanted & (first >= 0) & states.resident[jnp.maximum(first, 0)]
    return cache, slot, known


def _write_partial_blocks(
    cache: HybridCache, tokens: Array, points: _Points, config: HybridConfig
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


def _known_entry(cache: HybridCache, points: _Points) -> Array:
    """The entry of each point that is already there, or NO_ID; i32[Q]."""
    states = cache.states
    same = jnp.all(points.key[:, :, None] == states.key[:, None, :], axis=0)
    same &= points.depth[:, None] == states.depth[None, :]
    same &= points.wanted[:, None]
    found = jnp.argmax(same, axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(same, axis=1), found, NO_ID)


def _enter(
    cache: HybridCache, points: _Points, entry: Array, new: Array, now: Array
) -> tuple[HybridCache, Array]:
    """Entries for new points: their old ghost, a free one, the oldest ghost's."""
    states = cache.states
    size = states.num_entries
    reused = (
        jnp.zeros(size, bool).at[jnp.where(new, entry, size)].set(True, mode="drop")
    )
    lacks = new & (entry < 0)
    need = jnp.sum(lacks.astype(jnp.int32))
    free = (states.depth == 0) & ~reused
    ghost = (states.depth > 0) & ~states.resident & ~reused
    # Unused entries first, then ghosts by the time of their last use.
    order = jnp.where(free, -1, jnp.where(ghost, states.used_at, MAX_COUNT + 1))
    ranked = jnp.argsort(order, stable=True).astype(jnp.int32)
    nth = jnp.where(lacks, count_before(lacks), size)
    entry = jnp.where(lacks, ranked.at[nth].get(mode="fill", fill_value=size), entry)
    chosen = jnp.zeros(size, bool).at[ranked].set(iota(size) < need)
    dropped = chosen & ghost
    stats = record_drops(cache.stats, states, dropped, now)
    states = forget(states, dropped)
    rows = cache.rows
    gone = jnp.append(dropped, False)

    def alive(field: Array) -> Array:
        return jnp.where(gone[field], NO_ID, field)

    rows = rows.replace(
        past_entry=alive(rows.past_entry), last_entry=alive(rows.last_entry)
    )
    return cache.replace(states=states, stats=stats, rows=rows), entry


def _describe(
    cache: HybridCache,
    points: _Points,
    entry: Array,
    new: Array,
    again: Array,
    next_use: Array,
    now: Array,
) -> HybridCache:
    """Fills in new entries, refreshes known ones, and links both into the tree."""
    states, rows = cache.states, cache.rows
    size, row, depth = states.num_entries, points.row, points.depth
    where = jnp.where(new, entry, size)
    fresh = jnp.where(
        new & (states.depth[jnp.clip(entry, 0, size - 1)] == 0), entry, size
    )
    touched = jnp.where(points.wanted & (entry >= 0), entry, size)
    parent = _parent_of(cache, points, entry)
    answer = depth > rows.num_prompt_tokens[row]
    kind = jnp.select(
        [answer, depth == rows.branch_point[row], depth == rows.num_prompt_tokens[row]],
        [SnapshotKind.ANSWER, SnapshotKind.FORK, SnapshotKind.PROMPT_END],
        SnapshotKind.GRID,
    ).astype(jnp.int32)

    def put(field: Array, at: Array, value) -> Array:
        return field.at[at].set(value, mode="drop")

    tempo = answer & (rows.num_gaps[row] > 0)
    states = states.replace(
        depth=put(states.depth, where, depth),
        key=states.key.at[:, where].set(points.key, mode="drop"),
        parent=put(states.parent, fresh, parent),
        kind=put(states.kind, fresh, kind),
        last_used=put(states.last_used, touched, cache.tick),
        last_passed=put(states.last_passed, touched, cache.tick),
        filed_at=put(states.filed_at, where, now),
        used_at=put(states.used_at, where, now),
        num_hits=put(states.num_hits, fresh, 0),
        num_turns=put(states.num_turns, fresh, rows.num_turns[row]),
        sum_log_gap=put(
            states.sum_log_gap, fresh, jnp.where(tempo, rows.sum_log_gap[row], 0.0)
        ),
        num_gaps=put(states.num_gaps, fresh, jnp.where(tempo, rows.num_gaps[row], 0)),
        base_worth=put(states.base_worth, touched, cache.stats.inflation),
        next_use=put(states.next_use, touched, next_use[row]),
    )
    return cache.replace(states=_relink(cache, states, points, entry, fresh))


def _parent_of(cache: HybridCache, points: _Points, entry: Array) -> Array:
    """The deepest state known before each point on its row's path, or NO_ID; i32[Q]."""
    states, rows = cache.states, cache.rows
    best = jnp.full_like(entry, NO_ID)
    best_depth = jnp.zeros_like(entry)
    for other in (rows.past_entry[points.row], rows.last_entry[points.row]):
        at = jnp.maximum(other, 0)
        depth = jnp.where(other >= 0, states.depth[at], 0)
        better = (depth > best_depth) & (depth < points.depth)
        best = jnp.where(better, other, best)
        best_depth = jnp.where(better, depth, best_depth)
    # Points of the same row and call stand one on the other.
    same = points.row[:, None] == points.row[None, :]
    before = same & (entry >= 0)[None, :] & points.wanted[None, :]
    before &= points.depth[None, :] < points.depth[:, None]
    depth = jnp.where(before, points.depth[None, :], 0)
    nearest = jnp.argmax(depth, axis=1)
    inner = jnp.max(depth, axis=1, initial=0) > best_depth
    return jnp.where(inner, entry[nearest], best)


def _relink(cache: HybridCache, states, points: _Points, entry: Array, fresh: Array):
    """A new entry before the row's deepest known one becomes the latter's parent."""
    rows = cache.rows
    past = rows.past_entry[points.row]
    at = jnp.maximum(past, 0)
    between = (past >= 0) & (states.depth[at] > points.depth)
    old = states.parent[at]
    old_depth = jnp.where(old >= 0, states.depth[jnp.maximum(old, 0)], 0)
    between &= (points.depth > old_depth) & (fresh < states.num_entries)
    where = jnp.where(between, past, states.num_entries)
    return states.replace(parent=states.parent.at[where].set(entry, mode="drop"))


def _with_path_limit(
    cache: HybridCache,
    points: _Points,
    entry: Array,
    new: Array,
    victims: Victims,
    pending: Array,
) -> Victims:
    """Above the cap of a path its shallowest state that is no fork goes as well."""
    states = cache.states
    here = (states.resident | pending) & ~victims.entries
    parent, size = states.parent, states.num_entries
    count = here.astype(jnp.int32)
    plain = here & (states.kind != SnapshotKind.FORK)
    # Of a fork too: an entry that has several states behind it.
    lower = nearest_ancestors(parent, here, TREE_ROUNDS)
    children = jnp.zeros(size, jnp.int32)
    children = children.at[jnp.where(here & (lower >= 0), lower, size)].add(
        1, mode="drop"
    )
    plain &= children <= 1
    shallow = jnp.where(plain, states.depth, MAX_COUNT)
    which = iota(size)
    jump = jnp.where(parent < 0, size, parent)
    for _ in range(TREE_ROUNDS):
        up = jnp.minimum(jump, size - 1)
        inside = jump < size
        count = count + jnp.where(inside, count[up], 0)
        better = inside & (shallow[up] < shallow)
        which = jnp.where(better, which[up], which)
        shallow = jnp.where(better, shallow[up], shallow)
        jump = jnp.where(inside, jump[up], size)
    at = jnp.maximum(entry, 0)
    over = new & (count[at] > cache.path_limit) & (shallow[at] < MAX_COUNT)
    where = jnp.where(over, which[at], size)
    return Victims(victims.blocks, victims.entries.at[where].set(True, mode="drop"))


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
