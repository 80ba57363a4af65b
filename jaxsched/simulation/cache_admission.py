"""Requests into the cache, one after the other: lookup, reserve, tokens written.

A step in which nobody can enter runs nothing of this. Each prompt is looked up at the
narrowest width that holds it, so a short one does not pay for the longest.

Shape letters: R rows, A = 1 prompt, B blocks of a row, L tokens of a row.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.cache.hybrid import Match, MissReason, Prompts, lookup, reserve
from jaxsched.cache.running import release
from jaxsched.core.config import NO_ID
from jaxsched.core.masking import first_true
from jaxsched.simulation.cache_state import (
    CacheColumn,
    CacheRun,
    CacheSetup,
)
from jaxsched.simulation.cache_tokens import tokens_of
from jaxsched.simulation.replay_state import Arrivals, Settings

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Seats:
    """Where the requests that enter now stand in the cache, in their order."""

    row: Array  # i32[R]  of the cache
    num_cached_tokens: Array  # i32[R]
    learned: Array  # i32[R, 2]  branch and ghost points, or NO_ID


def empty_seats(num_rows: int) -> Seats:
    """Nobody has entered."""
    return Seats(
        row=jnp.zeros(num_rows, jnp.int32),
        num_cached_tokens=jnp.zeros(num_rows, jnp.int32),
        learned=jnp.full((num_rows, 2), NO_ID, jnp.int32),
    )


def enter_cache(
    arrivals: Arrivals,
    settings: Settings,
    run: CacheRun,
    chosen: Array,
    limit: Array,
    now: Array,
    setup: CacheSetup,
) -> tuple[CacheRun, Seats, Array]:
    """Reserves for one candidate after the other, until one does not fit.

    Args:
      arrivals: the requests.
      settings: of the run.
      run: the cache.
      chosen: i32[R], candidates, the most urgent one first.
      limit: i32[], how many of them may enter.
      now: i32[], milliseconds.
      setup: static.

    Returns:
      The cache, the seats of those that entered, and how many they are.
    """

    def goes_on(carry: tuple) -> Array:
        _, _, count, fits = carry
        return fits & (count < limit)

    def enter_next(carry: tuple) -> tuple:
        run, seats, count, _ = carry
        run, seats, fits = _enter_one(
            arrivals, settings, run, seats, count, chosen[count], now, setup
        )
        return run, seats, count + fits.astype(jnp.int32), fits

    carry = (run, empty_seats(chosen.shape[0]), jnp.int32(0), jnp.asarray(True))
    run, seats, count, _ = lax.while_loop(goes_on, enter_next, carry)
    return run, seats, count


def _enter_one(
    arrivals: Arrivals,
    settings: Settings,
    run: CacheRun,
    seats: Seats,
    seat: Array,
    request: Array,
    now: Array,
    setup: CacheSetup,
) -> tuple[CacheRun, Seats, Array]:
    length = arrivals.num_prompt_tokens[request]
    whole = length + arrivals.max_new_tokens[request]
    prompt = length + run.note(request, CacheColumn.NUM_RESUMED_OUTPUTS)
    tokens, match = _look_up(arrivals, settings, run, request, prompt, whole, setup)
    row = first_true(~run.tables.rows.is_used)
    prompts = Prompts(
        tokens=tokens[None, :],
        length=prompt[None],
        lora_id=arrivals.lora_id[request][None],
        salt=jnp.zeros(1, jnp.int32),
        reads=settings.cache.reads[None],
    )
    target = prompt if setup.grows else whole + settings.num_draft_tokens
    is_alone = ~jnp.any(run.tables.rows.is_used)

    def attempt(carry: tuple) -> tuple:
        tables, match, _, tries = carry
        match = jax.tree.map(
            lambda old, new: jnp.where(tries > 0, new, old), match, _without_hit(match)
        )
        tables, placed = reserve(
            tables, row[None], prompts, match, target[None], now, setup.hybrid
        )
        return tables, match, placed.granted[0], tries + 1

    def again(carry: tuple) -> Array:
        _, _, granted, tries = carry
        # What a hit pins can be what is missing: then nothing would ever run.
        return ~granted & ((tries == 0) | (is_alone & (tries == 1)))

    if setup.hybrid.is_unlimited:
        tables, placed = reserve(
            run.tables, row[None], prompts, match, target[None], now, setup.hybrid
        )
        granted = placed.granted[0]
    else:
        carry = (run.tables, match, jnp.asarray(False), jnp.int32(0))
        tables, match, granted, _ = lax.while_loop(again, attempt, carry)
    learned = jnp.where(
        settings.cache.learns_branches,
        jnp.stack([match.branch_point[0], match.ghost_point[0]]),
        0,
    )
    where = jnp.where(granted, seat, seats.row.shape[0])
    seats = Seats(
        row=seats.row.at[where].set(row, mode="drop"),
        num_cached_tokens=seats.num_cached_tokens.at[where].set(
            match.num_cached_tokens[0], mode="drop"
        ),
        learned=seats.learned.at[where].set(
            jnp.where(learned > 0, learned, NO_ID), mode="drop"
        ),
    )
    at = jnp.where(granted, row, run.tokens.shape[0])
    run = run.replace(
        tables=tables,
        tokens=run.tokens.at[at].set(tokens, mode="drop"),
        notes=_write_notes(run, request, match, learned, granted),
    )
    return run, seats, granted


def _look_up(
    arrivals: Arrivals,
    settings: Settings,
    run: CacheRun,
    request: Array,
    prompt: Array,
    whole: Array,
    setup: CacheSetup,
) -> tuple[Array, Match]:
    """All tokens of a request, i32[L], and what the cache has of its prompt."""
    size, width = setup.hybrid.block_size, setup.hybrid.blocks_per_row

    def at_width(blocks: int):
        narrow = dataclasses.replace(setup.hybrid, blocks_per_row=blocks)

        def found() -> tuple[Array, Match]:
            tokens = tokens_of(arrivals.spans, request, blocks * size)
            prompts = Prompts(
                tokens=tokens[None, :],
                length=prompt[None],
                lora_id=arrivals.lora_id[request][None],
                salt=jnp.zeros(1, jnp.int32),
                reads=settings.cache.reads[None],
            )
            match = lookup(run.tables, prompts, narrow)
            missing = width - blocks
            ids = jnp.pad(
                match.block_ids, ((0, 0), (0, missing)), constant_values=NO_ID
            )
            tokens = jnp.pad(tokens, (0, missing * size))
            return tokens, dataclasses.replace(match, block_ids=ids)

        return found

    fits = jnp.stack([whole <= blocks * size for blocks in setup.buckets])
    which = jnp.minimum(first_true(fits), len(setup.buckets) - 1)
    return lax.switch(which, [at_width(blocks) for blocks in setup.buckets])


def _without_hit(match: Match) -> Match:
    """The same match with nothing to reuse: its blocks cannot all be held."""
    none = jnp.full_like(match.entry, NO_ID)
    return dataclasses.replace(
        match,
        num_cached_tokens=jnp.zeros_like(match.num_cached_tokens),
        miss_reason=jnp.full_like(match.miss_reason, MissReason.NO_KV),
        block_ids=jnp.full_like(match.block_ids, NO_ID),
        entry=none,
    )


def _write_notes(
    run: CacheRun, request: Array, match: Match, learned: Array, granted: Array
) -> Array:
    """Notes on a request that enters: for the first time, or again."""
    old = run.notes[request]
    cached = match.num_cached_tokens[0]
    first = {
        CacheColumn.NUM_CACHED_TOKENS: cached,
        CacheColumn.NUM_KV_MATCHED_TOKENS: match.num_kv_matched_tokens[0],
        CacheColumn.NUM_STATE_MATCHED_TOKENS: match.num_state_matched_tokens[0],
        CacheColumn.MISS_REASON: match.miss_reason[0],
        CacheColumn.NUM_SEEN_TOKENS: match.num_seen_tokens[0],
        CacheColumn.BRANCH_POINT: learned[0],
        CacheColumn.GHOST_POINT: learned[1],
    }
    new = old
    for column, value in first.items():
        new = new.at[column].set(value)
    lost = jnp.maximum(old[CacheColumn.NUM_REACHED_TOKENS] - cached, 0)
    again = old.at[CacheColumn.NUM_RECOMPUTED_TOKENS].add(lost)
    new = jnp.where(old[CacheColumn.NUM_PREEMPTIONS] > 0, again, new)
    where = jnp.where(granted, request, run.notes.shape[0])
    return run.notes.at[where].set(new, mode="drop")


def leave_cache(run: CacheRun, gone: Array, setup: CacheSetup) -> CacheRun:
    """Releases the rows of the table that are gone, one after the other.

    Args:
      run: the cache.
      gone: bool[R], rows of the table.
      setup: static.
    """

    def one(carry: tuple) -> tuple:
        tables, left = carry
        which = first_true(left)
        tables = release(tables, run.row[which][None], setup.hybrid)
        return tables, left.at[which].set(False)

    tables, _ = lax.while_loop(lambda c: jnp.any(c[1]), one, (run.tables, gone))
    return run.replace(tables=tables, is_closed=run.is_closed & ~jnp.any(gone))
