"""What a step runs: room for the decodes, a plan in order of urgency, states filed.

The tables know of a step before the model has run it: what is committed here is
computed by the model in the same call, and nobody looks in between.

Shape letters: A rows, F points that a row can file in a step.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.cache.hybrid import Step, commit, grow
from jaxsched.core.config import NO_ID, Phase, Reason
from jaxsched.core.masking import iota
from jaxsched.core.plan import Plan
from jaxsched.core.requests import RequestTable
from jaxsched.engine.admission import leave
from jaxsched.engine.config import EngineConfig
from jaxsched.engine.model import ModelStep
from jaxsched.engine.state import EngineState
from jaxsched.scheduling.scheduler import schedule
from jaxsched.scheduling.snapshots import publish

Array = jax.Array


def by_urgency(table: RequestTable) -> Array:
    """Rows in the order in which they are served, empty ones last; i32[A]."""
    empty = table.phase == Phase.EMPTY
    order = jnp.lexsort((table.arrival, -table.priority, empty))
    return order.astype(jnp.int32)


def room_of(config: EngineConfig, state: EngineState) -> Array:
    """Tokens that each row can still compute in the blocks it holds; i32[A]."""
    held = state.cache.rows.num_blocks * config.block_size
    return held - state.table.num_computed_tokens


def make_room(
    config: EngineConfig, state: EngineState, num_steps: Array, now: Array
) -> tuple[EngineState, Array]:
    """Gives every decode a block for its next token, preempting the youngest rows.

    Blocks for further tokens of the call are taken where there are any, and nobody is
    preempted for them. The most urgent row is never preempted, and fits by itself.

    Args:
      config: static.
      state: of the engine.
      num_steps: i32[], decode steps of the call.
      now: i32[], milliseconds.

    Returns:
      The state, and bool[A]: rows that have to be computed again.
    """
    hybrid, size = config.hybrid(), config.max_num_seqs
    if not config.grows:
        return state, jnp.zeros(size, bool)

    def decodes(state: EngineState) -> Array:
        return state.table.phase == Phase.DECODE

    def grown(state: EngineState, steps: Array) -> EngineState:
        table = state.table
        last = table.num_prompt_tokens + table.max_new_tokens
        target = jnp.minimum(table.num_computed_tokens + steps, last)
        target = jnp.where(decodes(state), target, 0)
        cache, _ = grow(state.cache, target, now, hybrid)
        return state.replace(cache=cache)

    def is_short(state: EngineState) -> Array:
        living = jnp.sum((state.table.phase != Phase.EMPTY).astype(jnp.int32))
        lacking = jnp.any(decodes(state) & (room_of(config, state) < 1))
        return lacking & (living > 1)

    def last_row(state: EngineState) -> Array:
        living = state.table.phase != Phase.EMPTY
        order = by_urgency(state.table)
        return iota(size) == order[jnp.sum(living.astype(jnp.int32)) - 1]

    def again(carry: tuple) -> Array:
        state, _, round, steps = carry
        return (round == 0) | is_short(state) | (steps < num_steps)

    def body(carry: tuple) -> tuple:
        state, preempted, round, steps = carry
        # First what everybody needs, so that looking ahead takes nothing from anybody.
        preempts = (round > 0) & is_short(state)
        steps = jnp.where((round > 0) & ~preempts, num_steps, 1)
        gone = last_row(state) & preempts
        state = grown(leave(config, state, gone), steps)
        return state, preempted | gone, round + 1, steps

    carry = (state, jnp.zeros(size, bool), jnp.int32(0), jnp.int32(0))
    state, preempted, _, _ = lax.while_loop(again, body, carry)
    return state, preempted


def plan_step(model: ModelStep, config: EngineConfig, state: EngineState) -> Plan:
    """The plan of a step, row by row of the engine."""
    table = publish(state.table, config.snapshot_rules())
    order = by_urgency(table)
    place = jnp.zeros_like(order).at[order].set(iota(order.shape[0]))
    in_order = jax.tree.map(lambda column: column[order], table)
    plan = schedule(in_order, config.budget(), config.scheduler())
    plan = _fit_cells(model, in_order, plan)
    return plan.replace(
        **{name: getattr(plan, name)[place] for name in _BY_ROW},
        order=jnp.where(plan.order >= 0, order[jnp.maximum(plan.order, 0)], NO_ID),
    )


_BY_ROW = (
    *("num_scheduled_tokens", "num_draft_tokens", "is_last_chunk", "snapshot_point"),
    *("emit_points", "prefill_mask", "decode_mask", "encode_mask", "preempted_mask"),
    "reason",
)


def _fit_cells(model: ModelStep, table: RequestTable, plan: Plan) -> Plan:
    """Leaves out the last chunks that need more cells than the model's step has.

    The first one always fits: there is a cell more than the budget fills.
    """
    if not model.num_cells:
        return plan
    size = model.chunk_size
    start = table.num_computed_tokens
    end = start + plan.num_scheduled_tokens
    spans = (end + size - 1) // size - start // size
    spans = jnp.where(plan.prefill_mask, spans, 0)
    fits = jnp.cumsum(spans) <= model.num_cells
    kept = plan.prefill_mask & fits
    drop = plan.prefill_mask & ~fits
    return plan.replace(
        prefill_mask=kept,
        num_scheduled_tokens=jnp.where(drop, 0, plan.num_scheduled_tokens),
        is_last_chunk=plan.is_last_chunk & ~drop,
        snapshot_point=jnp.where(drop, NO_ID, plan.snapshot_point),
        emit_points=jnp.where(drop[:, None], NO_ID, plan.emit_points),
        reason=jnp.where(drop, Reason.NO_BUDGET, plan.reason),
    )


def step_points(config: EngineConfig, plan: Plan) -> Array:
    """Points whose states the step files, i32[A, F], NO_ID padded."""
    last = plan.snapshot_point[:, None]
    points = jnp.concatenate([plan.emit_points, last], axis=1) if config.emits else last
    return jnp.where(plan.prefill_mask[:, None], points, NO_ID)


def file_step(
    config: EngineConfig, state: EngineState, plan: Plan, points: Array, now: Array
) -> tuple[EngineState, Array, Array]:
    """Publishes what the step is about to compute of prompts, and files its points.

    Returns:
      The state; i32[A, F] slots that the states go to, or NO_ID; and bool[A, F]: the
      cache has a state there from now on.
    """
    table = state.table
    chunk = jnp.where(plan.prefill_mask, plan.num_scheduled_tokens, 0)
    done = jnp.minimum(table.num_computed_tokens + chunk, table.num_prompt_tokens)
    return _commit(config, state, done, points, now)


def file_answers(
    config: EngineConfig, state: EngineState, now: Array
) -> tuple[EngineState, Array]:
    """Publishes answers too, and files the ends of those that are finished.

    Call it behind `advance`.

    Returns:
      The state, and i32[A] slots to copy the rows' own states to, or NO_ID.
    """
    table = state.table
    finished = table.phase == Phase.FINISHED
    ends = jnp.where(finished, table.num_computed_tokens, NO_ID)
    points = jnp.full((config.max_num_seqs, config.num_filed), NO_ID, jnp.int32)
    points = points.at[:, 0].set(ends)
    state, slots, _ = _commit(config, state, table.num_computed_tokens, points, now)
    return state, slots[:, 0]


def _commit(
    config: EngineConfig, state: EngineState, done: Array, points: Array, now: Array
) -> tuple[EngineState, Array, Array]:
    hybrid = config.hybrid()
    step = Step(
        tokens=state.tokens,
        num_tokens=done,
        points=points,
        next_use=jnp.zeros_like(done),
    )
    cache, filed = commit(state.cache, step, now, hybrid)
    slots = jnp.where(filed.slot < hybrid.num_slots, filed.slot, NO_ID)
    known = filed.is_known & (points >= 0)
    return state.replace(cache=cache), slots, known
