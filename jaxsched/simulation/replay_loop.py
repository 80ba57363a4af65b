"""Many steps of a replay in one compiled loop: settle, publish, schedule, advance.

The loop comes back to the host only to empty its two logs. While all that runs are
decodes, the next plan is the same plan until a row finishes, a request arrives or a
client leaves; such steps are taken in one jump, whose length and duration are exact in
integers. So jumps change how long a replay takes, and nothing that it reports.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.config import NO_ID, Phase, SchedulerConfig
from jaxsched.core.masking import count_before
from jaxsched.core.plan import Plan
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.scheduler import advance, schedule
from jaxsched.scheduling.snapshots import publish
from jaxsched.simulation.cache_state import CacheColumn, CacheRun, CacheSetup
from jaxsched.simulation.cache_steps import (
    commit_step,
    make_space,
    passed_points,
    plan_points,
    room_of,
    steps_to_point,
)
from jaxsched.simulation.replay_clock import (
    MAX_JUMP,
    Ticks,
    add,
    earlier,
    less,
    never,
    product,
    select,
    step_cost,
    steps_cost,
    steps_until,
    subtract,
)
from jaxsched.simulation.replay_queue import has_events, next_arrival, settle
from jaxsched.simulation.replay_state import Arrivals, ReplayState, Settings

Array = jax.Array


@functools.partial(
    jax.jit,
    static_argnames=("config", "window", "setup"),
    donate_argnames=("state",),
)
def run_steps(
    arrivals: Arrivals,
    settings: Settings,
    state: ReplayState,
    *,
    config: SchedulerConfig,
    window: int,
    setup: CacheSetup,
) -> ReplayState:
    """Runs until every request has ended, a log is full, or nothing can run.

    Args:
      arrivals: the requests.
      settings: of the run, traced.
      state: donated; the entry counts of its logs say where to write on.
      config: static.
      window: see `settle`; static.
      setup: of the cache; static.
    """

    def goes_on(state: ReplayState) -> Array:
        room = state.num_step_entries < state.steps.shape[0]
        last = state.num_chunk_entries + state.table.num_rows
        room &= last <= state.chunks.shape[0]
        return room & ~state.stalled & (state.num_ended < settings.num_requests)

    def body(state: ReplayState) -> ReplayState:
        state = lax.while_loop(
            lambda state: has_events(arrivals, settings, state),
            lambda state: settle(arrivals, settings, state, window, setup),
            state,
        )
        if setup.grows:
            state = make_space(arrivals, settings, state, setup)
        return _step(arrivals, settings, state, config, setup)

    return lax.while_loop(goes_on, body, state)


def prepare(settings: Settings, table: RequestTable, run: CacheRun) -> RequestTable:
    """The table as it is planned: drafts proposed, snapshot points published."""
    decoding = table.phase == Phase.DECODE
    drafts = jnp.where(decoding, settings.num_draft_tokens, 0)
    # A request that was preempted computes its answer so far as if it were prompt, but
    # its snapshot points are still those of its own prompt.
    answered = run.note(table.request_id, CacheColumn.NUM_RESUMED_OUTPUTS)
    prompt = table.num_prompt_tokens
    table = table.replace(num_draft_tokens=drafts, num_prompt_tokens=prompt - answered)
    return publish(table, settings.rules).replace(num_prompt_tokens=prompt)


def _step(
    arrivals: Arrivals,
    settings: Settings,
    state: ReplayState,
    config: SchedulerConfig,
    setup: CacheSetup,
) -> ReplayState:
    """One plan, carried out once or, if it would not change, several times."""
    table = prepare(settings, state.table, state.cache)
    plan = schedule(table, settings.budget, config)
    event = earlier(next_arrival(arrivals, settings, state), state.next_deadline)
    confirmed = jnp.minimum(plan.num_draft_tokens, settings.num_accepted_tokens)
    rate = jnp.where(plan.decode_mask, 1 + confirmed, 0)
    repeats, duration = _stretch(settings, state, table, plan, rate, event, setup)

    ran = plan.num_seqs > 0
    waits = less(event, never())
    idle_until = select(waits, event, state.clock)
    clock = select(ran, add(state.clock, duration), idle_until)
    left = table.max_new_tokens - table.num_output_tokens
    after = advance(
        table,
        plan,
        num_accepted_tokens=jnp.minimum(repeats * rate, left) - 1,
        num_draft_tokens=jnp.zeros_like(rate),
    )
    points = plan_points(plan, config)
    passed = passed_points(settings, after, plan)
    points = points.at[:, 0].max(passed)
    run, filed = state.cache, jnp.zeros(points.shape, bool)
    if setup.is_used:
        run, filed = commit_step(settings, run, after, points, clock, setup)
    state = _log_step(state, plan, repeats, duration)
    is_kept = plan.decode_mask & filed[:, 0] & (passed >= 0)
    state = _log_chunks(state, table, plan, points, filed, is_kept)
    is_first = plan.is_last_chunk & ~less(state.first_token, never())
    return state.replace(
        table=after,
        cache=run,
        first_token=select(is_first, clock, state.first_token),
        clock=clock,
        num_step_entries=state.num_step_entries + ran.astype(jnp.int32),
        stalled=~ran & ~waits & (state.num_ended < settings.num_requests),
    )


def _tokens(plan: Plan, mask: Array) -> Array:
    """Tokens of some rows in the step, drafts included; i32[]."""
    tokens = plan.num_scheduled_tokens + plan.num_draft_tokens
    return jnp.sum(jnp.where(mask, tokens, 0))


def _stretch(
    settings: Settings,
    state: ReplayState,
    table: RequestTable,
    plan: Plan,
    rate: Array,
    event: Ticks,
    setup: CacheSetup,
) -> tuple[Array, Ticks]:
    """How often the plan is carried out before it can change, and what that takes."""
    scheduled = plan.scheduled_mask
    reach = table.num_computed_tokens + plan.num_scheduled_tokens
    context = jnp.sum(jnp.where(scheduled, reach + plan.num_draft_tokens, 0))
    tokens = _tokens(plan, scheduled)
    cost = settings.cost
    first = step_cost(cost, tokens.astype(jnp.uint32), context.astype(jnp.uint32))
    growth = product(cost.per_context, jnp.sum(rate).astype(jnp.uint32))

    left = table.max_new_tokens - table.num_output_tokens
    steps_left = (left + rate - 1) // jnp.maximum(rate, 1)
    if setup.is_used:
        done = table.num_computed_tokens
        steps_left = jnp.minimum(steps_left, steps_to_point(settings, done, rate))
    if setup.grows:
        steps_left = jnp.minimum(steps_left, room_of(settings, state, setup))
    limit = jnp.min(jnp.where(plan.decode_mask, steps_left, MAX_JUMP))
    limit = jnp.clip(limit, 1, MAX_JUMP)
    repeats = lax.cond(
        jnp.any(plan.decode_mask) & ~jnp.any(plan.prefill_mask),
        lambda: steps_until(first, growth, subtract(event, state.clock), limit),
        lambda: jnp.int32(1),
    )
    return repeats, steps_cost(first, growth, repeats.astype(jnp.uint32))


def _log_step(
    state: ReplayState, plan: Plan, repeats: Array, duration: Ticks
) -> ReplayState:
    """Writes a step entry; one that nothing ran in is overwritten by the next."""
    columns = (
        *(state.clock.hi, state.clock.lo, duration.hi, duration.lo, repeats),
        *(_tokens(plan, plan.prefill_mask), _tokens(plan, plan.decode_mask)),
        plan.num_seqs,
    )
    entry = jnp.stack([column.astype(jnp.uint32) for column in columns])
    at = (state.num_step_entries, jnp.int32(0))
    return state.replace(
        steps=lax.dynamic_update_slice(state.steps, entry[None, :], at)
    )


def _log_chunks(
    state: ReplayState,
    table: RequestTable,
    plan: Plan,
    points: Array,
    filed: Array,
    is_kept: Array,
) -> ReplayState:
    """Appends an entry for every chunk of a prompt; points and filed are [R, F].

    And one that starts nowhere for each decode whose state was kept: bool[R].
    """
    mask = plan.prefill_mask | is_kept
    start = table.num_computed_tokens
    columns = (
        *(jnp.broadcast_to(state.num_step_entries, mask.shape), table.request_id),
        *(jnp.where(is_kept, NO_ID, start), start + plan.num_scheduled_tokens),
        plan.snapshot_point,
    )
    kept = jnp.where(filed, points, NO_ID)
    entries = jnp.concatenate(
        [jnp.stack(columns, axis=1), plan.emit_points, kept], axis=1
    )
    place = jnp.where(
        mask, state.num_chunk_entries + count_before(mask), state.chunks.shape[0]
    )
    return state.replace(
        chunks=state.chunks.at[place].set(entries, mode="drop"),
        num_chunk_entries=state.num_chunk_entries + jnp.sum(mask.astype(jnp.int32)),
    )
