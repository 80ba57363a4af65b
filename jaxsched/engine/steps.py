"""One step of the engine as a pure function: plan, commit, model, sample, advance.

There are two of them: a mixed step (chunks of prompts, and one token of every decode),
and a call of up to k steps in which every row decodes. Each is compiled once. What
goes to the host is one small array of integers.

Shape letters: A rows, F points that a row can file in a step, k tokens of a call.
"""

import enum

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.config import NO_ID, Phase
from jaxsched.core.masking import iota
from jaxsched.core.plan import Plan
from jaxsched.engine.admission import leave
from jaxsched.engine.config import EngineConfig
from jaxsched.engine.model import Copies, ModelStep, RowWork, StepWork
from jaxsched.engine.planning import (
    file_answers,
    file_step,
    make_room,
    plan_step,
    room_of,
    step_points,
)
from jaxsched.engine.state import EngineState
from jaxsched.scheduling.scheduler import advance

Array = jax.Array


class Column(enum.IntEnum):
    """What a call reports of every row, i32; behind it F points, then k tokens."""

    PHASE = 0  # after the call
    START = 1  # of its chunk
    NUM_PREFILLED = 2  # tokens of its chunk
    NUM_SAMPLED = 3  # tokens
    IS_STOPPED = 4  # by a stop token
    IS_PREEMPTED = 5  # and has left its row


class Total(enum.IntEnum):
    """Columns of the last line of a report: sums over the call."""

    NUM_TOKENS = 0  # that the model has computed
    NUM_MISSED = 1  # pieces of work that found no room; must be 0
    NUM_STEPS = 2
    NUM_EVICTED_BLOCKS = 3  # since the engine was built
    NUM_EVICTED_SNAPSHOTS = 4


def mixed_step(
    model: ModelStep, config: EngineConfig, state: EngineState, weights, now: Array
) -> tuple[EngineState, Array]:
    """Chunks of prompts as the budget allows, and one token of every decode.

    Args:
      model, config: static.
      state: of the engine, donated.
      weights: of the model.
      now: i32[], milliseconds.

    Returns:
      The state, and the report i32[A + 1, Column + F + 1].
    """
    state, preempted = make_room(config, state, jnp.int32(1), now)
    plan = plan_step(model, config, state)
    points = step_points(config, plan)
    # The step writes to the blocks that the rows held before it; a block that is
    # exchanged for a published one of the same tokens is nobody's until the next step.
    tables = state.cache.rows.block_tables
    state, slots, known = file_step(config, state, plan, points, now)
    table = state.table
    start = table.num_computed_tokens
    runs = plan.prefill_mask | plan.decode_mask
    count = jnp.where(plan.prefill_mask, plan.num_scheduled_tokens, 1)
    count = jnp.where(runs, count, 0)
    own = iota(config.max_num_seqs) + 1
    work = StepWork(
        token_ids=state.tokens,
        start=start,
        count=count,
        is_decode=plan.decode_mask,
        is_last=plan.is_last_chunk,
        block_tables=tables,
        load_slots=jnp.where(start > 0, own, 0),
        store_slots=own,
        snapshot_points=points,
        snapshot_slots=slots,
    )
    pools, result = model.run(weights, state.pools, work)
    state = state.replace(pools=pools)
    last = jnp.maximum(start + count - 1, 0)
    sampled = model.sample(result.logits, last, state.sampling)
    samples = plan.is_last_chunk | plan.decode_mask
    state, sampled = _write_token(state, sampled, last, samples)
    stops = samples & _is_stop(state, sampled)
    state = state.replace(table=advance(table, plan, stop_mask=stops))
    row = {
        Column.START: start,
        Column.NUM_PREFILLED: jnp.where(plan.prefill_mask, count, 0),
        Column.NUM_SAMPLED: samples,
        Column.IS_STOPPED: stops,
        Column.IS_PREEMPTED: preempted,
    }
    totals = (result.num_tokens, result.num_missed, jnp.any(runs))
    shown = jnp.where(known, points, NO_ID)
    return _end(model, config, state, row, shown, sampled[:, None], totals, now)


def decode_call(
    model: ModelStep,
    config: EngineConfig,
    state: EngineState,
    weights,
    now: Array,
    num_steps: Array,
) -> tuple[EngineState, Array]:
    """Up to `num_steps` decode steps, tokens staying on the device between them.

    A row that meets a stop token, its last token or the end of its blocks rests: its
    pages and its state stay as they were behind its last token. For use while no
    prompt is to be computed.

    Args:
      model, config, state, weights, now: see `mixed_step`.
      num_steps: i32[], at most config.decode_steps.

    Returns:
      The state, and the report i32[A + 1, Column + F + config.decode_steps].
    """
    state, preempted = make_room(config, state, num_steps, now)
    plan = plan_step(model, config, state)
    table, rows = state.table, config.max_num_seqs
    left = table.max_new_tokens - table.num_output_tokens
    limit = jnp.minimum(num_steps, jnp.minimum(left, room_of(config, state)))
    limit = jnp.where(plan.decode_mask, limit, 0)
    start, tables = table.num_computed_tokens, state.cache.rows.block_tables
    out = jnp.zeros((rows, config.decode_steps), jnp.int32)

    def active(carry: tuple) -> Array:
        _, _, stopped, step = carry
        return (step < limit) & ~stopped

    def one(carry: tuple) -> tuple:
        state, out, stopped, step = carry
        runs, position = active(carry), start + step
        at = jnp.minimum(position, state.tokens.shape[1] - 1)
        work = RowWork(
            token_ids=state.tokens[iota(rows), at],
            positions=position,
            is_active=runs,
            block_tables=tables,
            slots=iota(rows) + 1,
        )
        pools, logits = model.decode(weights, state.pools, work)
        sampled = model.sample(logits, position, state.sampling)
        state, sampled = _write_token(
            state.replace(pools=pools), sampled, position, runs
        )
        out = out.at[:, step].set(jnp.where(runs, sampled, 0))
        return state, out, stopped | (runs & _is_stop(state, sampled)), step + 1

    carry = (state, out, jnp.zeros(rows, bool), jnp.int32(0))
    carry = lax.while_loop(lambda carry: jnp.any(active(carry)), one, carry)
    state, out, stopped, steps = carry
    # A row is never stopped by what lies behind its stop token, so its count is where
    # the first one lies, or its limit.
    known = iota(config.decode_steps)[None, :] < limit[:, None]
    hits = known & jnp.any(out[:, :, None] == state.stop_tokens[:, None, :], axis=2)
    first = jnp.argmax(hits, axis=1).astype(jnp.int32) + 1
    count = jnp.where(stopped, first, limit)
    state = state.replace(table=_advance_many(state, plan, count, stopped))
    row = {
        Column.START: start,
        Column.NUM_PREFILLED: jnp.zeros_like(start),
        Column.NUM_SAMPLED: count,
        Column.IS_STOPPED: stopped,
        Column.IS_PREEMPTED: preempted,
    }
    points = jnp.full((rows, config.num_filed), NO_ID, jnp.int32)
    totals = (jnp.sum(count), jnp.int32(0), steps)
    return _end(model, config, state, row, points, out, totals, now)


def _advance_many(state: EngineState, plan: Plan, count: Array, stops: Array):
    """The table behind `count` tokens of every decode; none where 0."""
    ran = plan.decode_mask & (count > 0)
    plan = plan.replace(decode_mask=ran, prefill_mask=jnp.zeros_like(ran))
    plan = plan.replace(is_last_chunk=jnp.zeros_like(ran))
    accepted = jnp.maximum(count - 1, 0)
    return advance(state.table, plan, num_accepted_tokens=accepted, stop_mask=stops)


def _write_token(
    state: EngineState, sampled: Array, last: Array, samples: Array
) -> tuple[EngineState, Array]:
    """Puts each row's token behind position `last`, unless it is known already."""
    rows, width = state.tokens.shape
    at = last + 1
    given = state.tokens[iota(rows), jnp.minimum(at, width - 1)]
    sampled = jnp.where(at < state.num_known, given, sampled)
    where = jnp.where(samples, at, width)
    tokens = state.tokens.at[iota(rows), where].set(sampled, mode="drop")
    return state.replace(tokens=tokens), sampled


def _is_stop(state: EngineState, token: Array) -> Array:
    """Whether each row's token is one of its stop tokens; bool[A]."""
    return jnp.any(state.stop_tokens == token[:, None], axis=1)


def _end(
    model: ModelStep,
    config: EngineConfig,
    state: EngineState,
    row: dict[Column, Array],
    points: Array,
    sampled: Array,
    totals: tuple[Array, ...],
    now: Array,
) -> tuple[EngineState, Array]:
    """Files answers, lets finished rows go, and writes the report."""
    if config.answer_snapshots and config.prefix_caching:
        state, slots = file_answers(config, state, now)
        size = config.max_num_seqs
        none = jnp.full(size, config.num_blocks, jnp.int32)
        past = config.hybrid().num_slots
        copies = Copies(
            page_source=jnp.zeros(size, jnp.int32),
            page_target=none,
            slot_source=iota(size) + 1,
            slot_target=jnp.where(slots >= 0, slots, past),
        )
        state = state.replace(pools=model.copy(state.pools, copies))
    phase = state.table.phase
    state = leave(config, state, phase == Phase.FINISHED)
    columns = row | {Column.PHASE: phase}
    head = [columns[name].astype(jnp.int32) for name in Column]
    report = jnp.concatenate([jnp.stack(head, axis=1), points, sampled], axis=1)
    cache = state.cache
    totals = (*totals, cache.num_evicted_blocks, cache.num_evicted_snapshots)
    line = jnp.stack([value.astype(jnp.int32) for value in totals])
    line = jnp.pad(line, (0, report.shape[1] - line.shape[0]))
    return state, jnp.concatenate([report, line[None, :]])
