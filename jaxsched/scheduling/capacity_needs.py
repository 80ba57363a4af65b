"""How many blocks a request takes: for its next step, or until its end.

Three kinds of pool are kept side by side in the columns of one array: the W attention
windows, the cross-attention pool, the recurrent-state slots. Column letter: C = W + 2.

Source: the block arithmetic of TensorRT-LLM's cache manager without sink tokens and
temporary windows, a sequence's own limit being the window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsched.core.config import MAX_COUNT, Phase, Reason
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.capacity_state import (
    CapacityConfig,
    CapacityPolicy,
    CapacityState,
)

Array = jax.Array

SATURATED = 2**30 - 1
"""Pool contents and running sums are held here; no finite pool is as large."""


class Roles(NamedTuple):
    """Which part a row plays."""

    alive: Array  # bool[R]  in a phase that can be admitted
    running: Array  # bool[R]  decoding, its last step included
    first_chunk: Array  # bool[R]  a prefill that has computed nothing itself
    started: Array  # bool[R]  decoding, or a prefill past its first chunk
    transfer: Array  # bool[R]  waits for a transferred cache
    encode: Array  # bool[R]


def roles_of(table: RequestTable) -> Roles:
    """The roles of all rows."""
    phase = table.phase
    prefill = phase == Phase.PREFILL
    first = prefill & (table.num_computed_tokens == table.num_cached_tokens)
    running = (phase == Phase.DECODE) | (phase == Phase.DECODE_TO_COMPLETE)
    transfer = phase == Phase.DISAGG_DECODE_INIT
    encode = phase == Phase.ENCODE
    return Roles(
        alive=prefill | running | transfer | encode,
        running=running,
        first_chunk=first,
        started=running | (prefill & ~first),
        transfer=transfer,
        encode=encode,
    )


def not_held(table: RequestTable) -> Array:
    """Rows that the caller does not keep out, bool[R]."""
    return table.hold_reason == Reason.SCHEDULED


def free_columns(state: CapacityState) -> Array:
    """What is free, i32[C]; a pool without a limit reads SATURATED."""
    cross = jnp.where(state.has_cross_pool, state.free_cross_blocks, 0)
    columns = [state.free_blocks, cross[None], state.free_state_slots[None]]
    return jnp.minimum(jnp.concatenate(columns), SATURATED)


def within_limits(state: CapacityState, need: Array) -> Array:
    """Needs i32[R, C] of pools without a limit read 0: they never run out."""
    return jnp.where(free_columns(state)[None, :] == SATURATED, 0, need)


def total_columns(state: CapacityState) -> Array:
    """Sizes of the pools, i32[C]."""
    cross = jnp.where(state.has_cross_pool, state.total_cross_blocks, 0)
    columns = [state.total_blocks, cross[None], state.total_state_slots[None]]
    return jnp.minimum(jnp.concatenate(columns), SATURATED)


def held_columns(state: CapacityState, beam_width: Array) -> Array:
    """What each row gives back when it is preempted, i32[R, C].

    Args:
      state: the pools.
      beam_width: i32[R], by which the blocks of the windows are multiplied.
    """
    blocks = _times(state.allocated_blocks, beam_width[:, None])
    others = [state.allocated_cross_blocks, state.allocated_state_slots]
    return jnp.concatenate([blocks, jnp.stack(others, axis=1)], axis=1)


def step_columns(table: RequestTable, state: CapacityState) -> Array:
    """What the next step of each row takes, i32[R, C]."""
    blocks = blocks_for_step(table, state)
    return _columns(table, state, blocks, _cross_for_step(table, state))


def completion_columns(table: RequestTable, state: CapacityState) -> Array:
    """What each row will still take until its end, i32[R, C]; may be negative."""
    blocks = blocks_to_completion(table, state)
    return _columns(table, state, blocks, _cross_to_completion(table, state))


def _columns(table, state: CapacityState, blocks: Array, cross: Array) -> Array:
    role = roles_of(table)
    takes_slots = role.alive & ~role.started & ~role.encode
    slots = jnp.where(takes_slots, state.new_state_slots, 0)
    cross = jnp.where(state.has_cross_pool, cross, 0)
    return jnp.concatenate([blocks, jnp.stack([cross, slots], axis=1)], axis=1)


def blocks_to_completion(table: RequestTable, state: CapacityState) -> Array:
    """Blocks of every window until the end of each row, i32[R, W].

    Full prompt blocks are shared by the beams, everything behind them is not. A
    sequence that slides past its window needs one block more while it moves.
    """
    size, window = state.block_size, state.window[None, :]
    role = roles_of(table)
    prompt = table.num_prompt_tokens[:, None]
    longest = prompt + table.max_new_tokens[:, None]
    beams = table.beam_width[:, None]
    held = state.allocated_blocks
    shared = jnp.minimum(prompt, window) // size
    total = _up(jnp.minimum(longest, window), size)
    generated = total - shared
    current = prompt + table.num_output_tokens[:, None]
    grows = _up(longest, size) > jnp.maximum(_up(current, size), total)
    extra = ((longest > window) & grows).astype(jnp.int32)
    reused = jnp.minimum(_referenced(table, state)[:, None], shared)
    reused = jnp.where(held == 0, reused, 0)
    shared, total = shared - reused, total - reused
    blocks = jnp.where(
        held < shared,
        shared - held + _times(generated + extra, beams),
        _times(total - held + extra, beams),
    )
    return jnp.where(role.encode[:, None], 0, jnp.minimum(blocks, MAX_COUNT))


def blocks_for_step(table: RequestTable, state: CapacityState) -> Array:
    """Blocks of every window for the next step of each row, i32[R, W].

    A first chunk takes the blocks of its whole prompt, so later chunks take none.
    """
    size, window = state.block_size, state.window[None, :]
    role = roles_of(table)
    beams = table.beam_width[:, None]
    drafts = table.num_draft_tokens[:, None]
    new = table.max_new_tokens[:, None]
    tokens = table.num_prompt_tokens[:, None] + drafts
    # Compared without adding window and new tokens, whose sum could pass int32.
    tokens = jnp.where(tokens - new <= window, tokens, window + new)
    prompt_blocks = tokens // size + jnp.where(tokens % size == 0, 0, beams)
    reused = _referenced(table, state)[:, None]
    prompt_blocks = jnp.maximum(prompt_blocks - reused, 0)
    output = table.num_output_tokens[:, None]
    current = table.num_prompt_tokens[:, None] + output
    steps = jnp.where(state.two_step_lookahead, 2, 1)
    end = current + jnp.minimum(steps * (drafts + 1), new - output)
    grown = _times(_up(end, size) - _up(current, size), beams)
    grown = jnp.where(role.running[:, None] & (end <= window), grown, 0)
    whole = (role.first_chunk | role.transfer)[:, None]
    return jnp.where(whole, prompt_blocks, grown)


def _referenced(table: RequestTable, state: CapacityState) -> Array:
    """Prompt blocks that a first chunk shares with others; one window only; i32[R]."""
    counts = roles_of(table).first_chunk & (state.num_windows == 1)
    return jnp.where(counts, state.num_referenced_blocks, 0)


def _cross_to_completion(table: RequestTable, state: CapacityState) -> Array:
    at_start = (table.phase == Phase.PREFILL) & (table.num_computed_tokens == 0)
    return jnp.where(at_start, _up(table.num_encoder_tokens, state.block_size), 0)


def _cross_for_step(table: RequestTable, state: CapacityState) -> Array:
    role = roles_of(table)
    tokens = table.num_encoder_tokens + table.num_draft_tokens
    partial = jnp.where(tokens % state.block_size == 0, 0, table.beam_width)
    blocks = tokens // state.block_size + partial
    return jnp.where(role.first_chunk | role.transfer, blocks, 0)


def _up(count: Array, size: Array) -> Array:
    """`count / size` rounded up; no intermediate is above `count`."""
    return -(-count // size)


def _times(blocks: Array, beams: Array) -> Array:
    """`blocks * beams`, held below 2**30 on both sides."""
    most = MAX_COUNT // beams
    return jnp.clip(blocks, -most, most) * beams


def required_columns(
    table: RequestTable, state: CapacityState, config: CapacityConfig
) -> Array:
    """What each row needs of pools that hold nothing else, i32[R, C].

    Until its end where the policy guarantees that end; otherwise for its next step,
    on top of what it holds if it has started.
    """
    fresh = state.replace(
        allocated_blocks=jnp.zeros_like(state.allocated_blocks),
        num_referenced_blocks=jnp.zeros_like(state.num_referenced_blocks),
    )
    if config.policy != CapacityPolicy.MAX_UTILIZATION:
        return completion_columns(table, fresh)
    role = roles_of(table)
    held = held_columns(state, table.beam_width)
    whole = (role.first_chunk | role.transfer)[:, None]
    more = step_columns(table, state) - jnp.where(whole, held, 0)
    holds = role.started | jnp.any(held > 0, axis=1)
    return jnp.where(
        holds[:, None], jnp.maximum(more, 0) + held, step_columns(table, fresh)
    )
