"""Admission: match in hand, all of a request's blocks or nothing of it.

Shape letters: A listed rows, R rows, B blocks of a row, N blocks, E entries.
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
from jaxsched.cache.blocks import hold
from jaxsched.cache.eviction import TREE_ROUNDS, Eviction
from jaxsched.cache.ghosts import record_hits, used_entries
from jaxsched.cache.hybrid_types import HybridCache, HybridConfig
from jaxsched.cache.prefix import Match, Prompts
from jaxsched.cache.states import live_slot, sum_behind
from jaxsched.core.config import NO_ID
from jaxsched.core.masking import iota

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """What was granted, and the copies that make it true.

    Targets past the end mean that nothing is copied.
    """

    granted: Array  # bool[A]
    num_cached_tokens: Array  # i32[A]  where the row starts; 0 where not granted
    block_source: Array  # i32[A]  KV block whose first tokens the row takes over
    block_target: Array  # i32[A]
    num_copied_tokens: Array  # i32[A]
    state_source: Array  # i32[A]  slot of the snapshot
    state_target: Array  # i32[A]  live slot of the row
    zero_target: Array  # i32[A]  live slots that start from zeros


def reserve(
    cache: HybridCache,
    rows: Array,
    prompts: Prompts,
    match: Match,
    target: Array,
    now: Array,
    config: HybridConfig,
) -> tuple[HybridCache, Placed]:
    """Admits requests in order: all of a request's blocks, or nothing of it.

    Shares the matched blocks, takes new ones up to `target` tokens, evicting where
    needed, and names the copies that restore the state. The first request that does
    not fit stops those behind it; one that could never fit is passed over.

    Args:
      cache: the one `match` was made on.
      rows: i32[A], unused rows, all different; NO_ID: this prompt is not admitted.
      prompts: the prompts that were looked up.
      match: what was found.
      target: i32[A], tokens to make room for, at least the matched ones.
      now: i32[], milliseconds.
      config: static.
    """
    size, width = config.block_size, config.blocks_per_row
    depth = match.num_cached_tokens
    shared = depth // size
    target = jnp.where(target > 0, jnp.maximum(target, depth + 1), 0)
    needed = (target + size - 1) // size
    wanted = (rows >= 0) & (target > 0) & (needed <= width)
    wanted &= needed <= cache.block_limit
    new = jnp.where(wanted, needed - shared, 0)
    entry = jnp.maximum(match.entry, 0)
    partial = (match.entry >= 0) & (depth % size > 0)
    source = jnp.where(partial, cache.states.block[entry], cache.blocks.num_blocks)
    column = iota(width)[None, :]
    uses = (column < shared[:, None]) & wanted[:, None]
    cost = new + _first_pins(cache, match, uses, source, wanted, config)
    granted = wanted & running_fits(cache, cost, config)

    uses &= granted[:, None]
    tick = cache.tick + 1
    blocks = hold(cache.blocks, match.block_ids, uses, tick)
    past = cache.blocks.num_blocks
    source = jnp.where(granted, source, past)
    blocks = blocks.replace(
        last_used=blocks.last_used.at[source].set(tick, mode="drop")
    )
    hit = granted & (match.entry >= 0)
    kept = jnp.where(hit, match.entry, cache.states.num_entries)
    cache = _use_states(
        cache.replace(blocks=blocks, tick=tick), match, granted, hit, now, config
    )
    taken = jnp.where(granted, new, 0)
    cache = make_room_if_short(cache, jnp.sum(taken), source, kept, now, config)
    cache, ids = take_free(cache, taken, width, config)
    lost = cache.rows.num_rows
    row = jnp.where(granted, rows, lost)
    cache = _open_rows(cache, row, prompts, match, shared, taken, ids, config)
    first = jnp.where(partial & granted, ids[:, 0], past)
    slots = config.num_slots
    placed = Placed(
        granted=granted,
        num_cached_tokens=jnp.where(granted, depth, 0),
        block_source=source,
        block_target=first,
        num_copied_tokens=jnp.where(partial & granted, depth % size, 0),
        state_source=jnp.where(hit, cache.states.slot[entry], 0),
        state_target=jnp.where(hit, live_slot(rows), slots),
        zero_target=jnp.where(granted & ~hit, live_slot(rows), slots),
    )
    return cache, placed


def _first_pins(
    cache: HybridCache,
    match: Match,
    uses: Array,
    source: Array,
    wanted: Array,
    config: HybridConfig,
) -> Array:
    """Idle blocks that each request is the first of its call to pin; i32[A]."""
    blocks, states = cache.blocks, cache.states
    size, order = blocks.num_blocks, iota(wanted.shape[0])
    if config.is_unlimited:  # what is pinned was never going to be handed out
        return jnp.zeros_like(order)
    ids = jnp.where(uses, match.block_ids, size)
    ids = jnp.concatenate([ids, jnp.where(wanted, source, size)[:, None]], axis=1)
    rank = jnp.broadcast_to(order[:, None], ids.shape)
    at = jnp.minimum(ids, size - 1)
    idle = (ids < size) & (blocks.num_refs[at] == 0)
    if order.shape[0] > 1:
        first = jnp.full(size, order.shape[0], jnp.int32)
        first = first.at[ids].min(rank, mode="drop")
        idle &= first[at] == rank
    pins = jnp.sum(idle.astype(jnp.int32), axis=1)
    if not config.is_shared:
        return pins
    entry = jnp.where(wanted & (match.entry >= 0), match.entry, states.num_entries)
    first = jnp.full(states.num_entries, order.shape[0], jnp.int32)
    first = first.at[entry].min(order, mode="drop")
    at = jnp.minimum(entry, states.num_entries - 1)
    pinned = (entry < states.num_entries) & (first[at] == order)
    return pins + jnp.where(pinned, config.pages_per_snapshot, 0)


def _use_states(
    cache: HybridCache,
    match: Match,
    granted: Array,
    hit: Array,
    now: Array,
    config: HybridConfig,
) -> HybridCache:
    """Marks the states that were used or passed, and learns from it."""
    if config.is_unlimited:
        return cache
    states, tick = cache.states, cache.tick
    size = states.num_entries
    past = jnp.where(granted, match.past_entry, NO_ID)
    leaf = jnp.full_like(past, NO_ID)
    if config.eviction == Eviction.AGE_HISTOGRAM:
        here = states.resident.astype(jnp.int32)
        below = sum_behind(states.parent, here, TREE_ROUNDS)
        is_leaf = below[jnp.maximum(match.entry, 0)] == 1
        leaf = jnp.where(hit & is_leaf, match.entry, NO_ID)
    stats = record_hits(cache.stats, states, past, leaf, now)
    depth = match.num_cached_tokens
    passed = match.on_path & (states.depth[None, :] <= depth[:, None])
    passed = jnp.any(passed & granted[:, None], axis=0)
    used = jnp.where(hit, match.entry, size)
    states = used_entries(states, past, now)
    states = states.replace(
        last_passed=jnp.where(passed, tick, states.last_passed),
        last_used=states.last_used.at[used].set(tick, mode="drop"),
        base_worth=states.base_worth.at[used].set(stats.inflation, mode="drop"),
    )
    return cache.replace(states=states, stats=stats)


def _open_rows(
    cache: HybridCache,
    row: Array,
    prompts: Prompts,
    match: Match,
    shared: Array,
    count: Array,
    ids: Array,
    config: HybridConfig,
) -> HybridCache:
    """Writes the rows of granted requests; `row` is past the end for the others."""
    rows, states = cache.rows, cache.states
    table, held = joined_tables(match.block_ids, ids, shared, count, config.num_blocks)

    def put(field: Array, value: Array) -> Array:
        return field.at[row].set(value, mode="drop")

    blocks = hold(cache.blocks, table, held, cache.tick)
    rows = rows.replace(
        block_tables=put(rows.block_tables, table),
        num_blocks=put(rows.num_blocks, shared + count),
        num_tokens=put(rows.num_tokens, match.num_cached_tokens),
        num_indexed=put(rows.num_indexed, shared),
        is_private=put(rows.is_private, ~prompts.reads),
        is_used=put(rows.is_used, jnp.ones_like(prompts.reads)),
        lora_id=put(rows.lora_id, prompts.lora_id),
        salt=put(rows.salt, prompts.salt),
        num_prompt_tokens=put(rows.num_prompt_tokens, prompts.length),
    )
    cache = cache.replace(rows=rows, blocks=blocks)
    if config.is_unlimited:  # the rest is for eviction
        return cache
    past = jnp.maximum(match.past_entry, 0)
    # The session's own tempo goes on with its next answer; a fork's does not.
    answer = match.continues_answer
    rows = rows.replace(
        branch_point=put(rows.branch_point, match.branch_point),
        past_entry=put(rows.past_entry, match.past_entry),
        last_entry=put(rows.last_entry, match.entry),
        num_turns=put(rows.num_turns, jnp.where(answer, states.num_turns[past] + 1, 0)),
        sum_log_gap=put(
            rows.sum_log_gap, jnp.where(answer, states.sum_log_gap[past], 0.0)
        ),
        num_gaps=put(rows.num_gaps, jnp.where(answer, states.num_gaps[past], 0)),
    )
    return cache.replace(rows=rows)
