"""Entries of states: a place in the tree for each that is filed, or was.

Which entry is another's parent steers eviction only; what a state may be used for is
always read from its blocks.

Shape letters: R rows, F points of a row, Q = R * F, E entries.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsched.cache.allocation import Victims
from jaxsched.cache.eviction import TREE_ROUNDS
from jaxsched.cache.ghosts import record_drops
from jaxsched.cache.hybrid_types import HybridCache
from jaxsched.cache.states import (
    SnapshotKind,
    StateTable,
    forget,
    nearest_ancestors,
)
from jaxsched.core.config import MAX_COUNT, NO_ID
from jaxsched.core.masking import count_before, iota

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Points:
    """Points of all rows in one list; i32[Q] unless said."""

    row: Array
    depth: Array
    block: Array
    key: Array  # u32[2, Q]
    wanted: Array  # bool[Q]


def enter(
    cache: HybridCache, points: Points, entry: Array, new: Array, now: Array
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


def describe(
    cache: HybridCache,
    points: Points,
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


def _parent_of(cache: HybridCache, points: Points, entry: Array) -> Array:
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


def _relink(
    cache: HybridCache,
    states: StateTable,
    points: Points,
    entry: Array,
    fresh: Array,
) -> StateTable:
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


def remember_last(cache: HybridCache, points: Points, entry: Array) -> HybridCache:
    """Each row's deepest entry so far: the next one will stand on it."""
    rows = cache.rows
    shape = (rows.num_rows, -1)
    depth = jnp.where(points.wanted & (entry >= 0), points.depth, 0).reshape(shape)
    best = jnp.argmax(depth, axis=1)
    each = iota(rows.num_rows)
    old = jnp.maximum(rows.last_entry, 0)
    old_depth = jnp.where(rows.last_entry >= 0, cache.states.depth[old], 0)
    deeper = depth[each, best] > old_depth
    last = jnp.where(deeper, entry.reshape(shape)[each, best], rows.last_entry)
    return cache.replace(rows=rows.replace(last_entry=last))


def cap_paths(
    cache: HybridCache,
    points: Points,
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
