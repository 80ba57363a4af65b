"""What a step does to the cache: publish, file, and before it make room or preempt.

Shape letters: R rows, F = 1 + E points of a chunk, L tokens of a row.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.cache.commit import Step, file_points, num_unpublished, publish_blocks
from jaxsched.cache.running import grow, release
from jaxsched.core.config import NO_ID, Phase, SchedulerConfig, SnapshotMode
from jaxsched.core.masking import iota
from jaxsched.core.plan import Plan
from jaxsched.core.requests import RequestTable
from jaxsched.simulation.cache_state import CacheColumn, CacheRun, CacheSetup
from jaxsched.simulation.replay_clock import MAX_JUMP, Ticks, milliseconds
from jaxsched.simulation.replay_state import (
    Arrivals,
    ReplayState,
    ResultColumn,
    Settings,
)

Array = jax.Array


def plan_points(plan: Plan, config: SchedulerConfig) -> Array:
    """Points that each chunk ends on or runs past, i32[R, F], NO_ID padded."""
    last = jnp.where(plan.prefill_mask, plan.snapshot_point, NO_ID)[:, None]
    if config.snapshot_mode == SnapshotMode.CUT:
        return last
    inner = jnp.where(plan.prefill_mask[:, None], plan.emit_points, NO_ID)
    return jnp.concatenate([last, inner], axis=1)


def steps_to_point(settings: Settings, position: Array, rate: Array) -> Array:
    """Steps of `rate` tokens until the next periodic point is reached; i32[R]."""
    interval = settings.cache.decode_interval
    left = interval - position % jnp.maximum(interval, 1)
    steps = (left + rate - 1) // jnp.maximum(rate, 1)
    return jnp.where((interval > 0) & (rate > 0), steps, MAX_JUMP)


def passed_points(settings: Settings, after: RequestTable, plan: Plan) -> Array:
    """Periodic points that decodes stand on after a step, NO_ID where none; i32[R]."""
    interval = settings.cache.decode_interval
    position = after.num_computed_tokens
    on = plan.decode_mask & (interval > 0)
    on &= position % jnp.maximum(interval, 1) == 0
    return jnp.where(on, position, NO_ID)


def commit_step(
    settings: Settings,
    run: CacheRun,
    table: RequestTable,
    points: Array,
    clock: Ticks,
    setup: CacheSetup,
) -> tuple[CacheRun, Array]:
    """Publishes what the step has computed and files the states that it stood on.

    Args:
      settings: of the run.
      run: the cache.
      table: after the step.
      points: i32[R, F], by rows of the table.
      clock: when the step has ended.
      setup: static.

    Returns:
      The cache, and bool[R, F]: the cache has a state there now.
    """
    hybrid = setup.hybrid
    runs = (
        (table.phase == Phase.PREFILL)
        | (table.phase == Phase.DECODE)
        | (table.phase == Phase.FINISHED)
    )
    place = jnp.where(runs, run.row, hybrid.num_rows)
    answered = (table.phase == Phase.FINISHED) & settings.cache.files_answers
    ends = jnp.where(answered, table.num_computed_tokens, NO_ID)
    # With one output token the answer ends where the prompt does.
    points = points.at[:, 0].set(jnp.where(points[:, 0] >= 0, points[:, 0], ends))
    num_tokens = jnp.zeros(hybrid.num_rows, jnp.int32)
    step = Step(
        tokens=run.tokens,
        num_tokens=num_tokens.at[place].set(table.num_computed_tokens, mode="drop"),
        points=jnp.full((hybrid.num_rows, points.shape[1]), NO_ID, jnp.int32)
        .at[place]
        .set(points, mode="drop"),
        next_use=jnp.zeros(hybrid.num_rows, jnp.int32),
    )

    def pending(tables) -> Array:
        return jnp.sum(num_unpublished(tables, step.num_tokens, hybrid))

    def work(run: CacheRun) -> tuple[CacheRun, Array]:
        tables = lax.while_loop(
            lambda tables: pending(tables) > 0,
            lambda tables: publish_blocks(tables, step, hybrid),
            run.tables,
        )
        tables, filed = file_points(tables, step, milliseconds(clock), hybrid)
        count = jnp.sum((filed.slot < hybrid.num_slots).astype(jnp.int32))
        known = filed.is_known[run.row] & (points >= 0)
        request = jnp.where(answered & known[:, 0], table.request_id, -1)
        where = jnp.where(request >= 0, request, run.notes.shape[0])
        notes = run.notes.at[where, CacheColumn.ANSWER_SNAPSHOT].set(ends, mode="drop")
        run = run.replace(
            tables=tables,
            notes=notes,
            num_filed_snapshots=run.num_filed_snapshots + count,
        )
        return run, known

    def nothing(run: CacheRun) -> tuple[CacheRun, Array]:
        return run, jnp.zeros(points.shape, bool)

    return lax.cond((pending(run.tables) > 0) | jnp.any(points > 0), work, nothing, run)


def room_of(settings: Settings, state: ReplayState, setup: CacheSetup) -> Array:
    """Steps that each decode can take in the blocks it holds, at least 0; i32[R]."""
    rows = state.cache.tables.rows
    held = rows.num_blocks[state.cache.row] * setup.hybrid.block_size
    drafts = settings.num_draft_tokens
    rate = 1 + settings.num_accepted_tokens
    return jnp.maximum(
        (held - state.table.num_computed_tokens - 1 - drafts) // rate + 1, 0
    )


def make_space(
    arrivals: Arrivals, settings: Settings, state: ReplayState, setup: CacheSetup
) -> ReplayState:
    """Gives every decode the blocks of its next step, preempting the last rows.

    The first row is never preempted, and whoever enters fits into the pool alone: so
    somebody always goes on.
    """

    def short(state: ReplayState) -> Array:
        decodes = state.table.phase == Phase.DECODE
        return jnp.any(decodes & (room_of(settings, state, setup) < 1))

    def make(state: ReplayState) -> ReplayState:
        table, run = state.table, state.cache
        decodes = table.phase == Phase.DECODE
        target = table.num_computed_tokens + 1 + settings.num_draft_tokens
        place = jnp.where(decodes, run.row, setup.hybrid.num_rows)
        targets = jnp.zeros(setup.hybrid.num_rows, jnp.int32)
        targets = targets.at[place].set(target, mode="drop")
        now = milliseconds(state.clock)
        tables, _ = grow(run.tables, targets, now, setup.hybrid)
        state = state.replace(cache=run.replace(tables=tables))
        living = decodes | (table.phase == Phase.PREFILL)
        last = jnp.max(jnp.where(living, iota(table.num_rows), 0))
        return _preempt(arrivals, state, last, short(state), setup)

    return lax.while_loop(short, make, state)


def _preempt(
    arrivals: Arrivals,
    state: ReplayState,
    index: Array,
    is_needed: Array,
    setup: CacheSetup,
) -> ReplayState:
    """Sends a row back to the queue; what it committed stays cached."""
    table, run = state.table, state.cache
    request = table.request_id[index]
    row = jnp.where(is_needed, run.row[index], NO_ID)
    at = jnp.where(is_needed, request, run.notes.shape[0])
    notes = (
        run.notes.at[at, CacheColumn.NUM_PREEMPTIONS]
        .add(1, mode="drop")
        .at[at, CacheColumn.NUM_RESUMED_OUTPUTS]
        .add(table.num_output_tokens[index], mode="drop")
        .at[at, CacheColumn.NUM_REACHED_TOKENS]
        .set(table.num_computed_tokens[index], mode="drop")
    )
    results = state.results
    for column, value in (
        (ResultColumn.ADMITTED_HI, state.admitted.hi),
        (ResultColumn.ADMITTED_LO, state.admitted.lo),
        (ResultColumn.FIRST_TOKEN_HI, state.first_token.hi),
        (ResultColumn.FIRST_TOKEN_LO, state.first_token.lo),
    ):
        results = results.at[at, column].set(value[index], mode="drop")
    where = jnp.where(is_needed, index, table.num_rows)
    head = jnp.minimum(state.head, arrivals.rank[request])
    return state.replace(
        table=table.replace(phase=table.phase.at[where].set(Phase.EMPTY, mode="drop")),
        cache=run.replace(
            tables=release(run.tables, row[None], setup.hybrid),
            notes=notes,
            is_closed=run.is_closed | is_needed,
        ),
        results=results,
        left_queue=state.left_queue.at[at].set(False, mode="drop"),
        head=jnp.where(is_needed, head, state.head),
    )
