"""Whole runs of a table as one compiled loop: plan, advance, repeat."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.config import NO_ID, Phase, SchedulerConfig
from jaxsched.core.plan import Budget, Plan
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.scheduler import advance, schedule

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunResult:
    """What a run to completion did."""

    table: RequestTable
    num_steps: Array  # i32[]
    num_batched_tokens: Array  # i32[]  over all steps, held at the int32 maximum
    first_token_step: Array  # i32[R]  step that sampled the first token, NO_ID: none
    finish_step: Array  # i32[R]  NO_ID: not finished
    num_snapshots: Array  # i32[R]  points stood on or emitted
    stalled: Array  # bool[]  ended because a step scheduled nothing


def rollout(
    table: RequestTable,
    budget: Budget,
    config: SchedulerConfig,
    *,
    num_steps: int,
) -> tuple[RequestTable, Plan]:
    """Runs a fixed number of steps and keeps every plan.

    Args:
      table: the requests, snapshot points published.
      budget: limits of each step.
      config: static.
      num_steps: static.

    Returns:
      The table after the last step, and the plans stacked on a leading axis of
      length `num_steps`. Once nothing is left to do, plans are empty.
    """

    def step(table: RequestTable, _):
        plan = schedule(table, budget, config)
        return advance(table, plan), plan

    return lax.scan(step, table, length=num_steps)


def run_to_completion(
    table: RequestTable,
    budget: Budget,
    config: SchedulerConfig,
    *,
    max_steps: Array | int,
) -> RunResult:
    """Runs prefill and decode until every row is finished, as one `lax.while_loop`.

    Ends early after `max_steps`, or when a step schedules nothing: then what is left
    waits for something outside the table, and the plan of the returned table says for
    what.

    Args:
      table: the requests, snapshot points published.
      budget: limits of each step.
      config: static.
      max_steps: i32[], may be traced.
    """
    nothing = jnp.full_like(table.phase, NO_ID)
    start = RunResult(
        table=table,
        num_steps=jnp.int32(0),
        num_batched_tokens=jnp.int32(0),
        first_token_step=nothing,
        finish_step=nothing,
        num_snapshots=jnp.zeros_like(table.phase),
        stalled=jnp.asarray(False),
    )

    def unfinished(run: RunResult) -> Array:
        phase = run.table.phase
        open_rows = (phase != Phase.EMPTY) & (phase != Phase.FINISHED)
        return jnp.any(open_rows) & ~run.stalled & (run.num_steps < max_steps)

    def step(run: RunResult) -> RunResult:
        plan = schedule(run.table, budget, config)
        return _record(run, plan, advance(run.table, plan))

    return lax.while_loop(unfinished, step, start)


def _record(run: RunResult, plan: Plan, table: RequestTable) -> RunResult:
    sampled = table.num_output_tokens > run.table.num_output_tokens
    finished = (table.phase == Phase.FINISHED) & (run.table.phase != Phase.FINISHED)
    first = sampled & (run.first_token_step == NO_ID)
    landed = (plan.snapshot_point != NO_ID).astype(jnp.int32)
    landed += jnp.sum((plan.emit_points != NO_ID).astype(jnp.int32), axis=1)
    stalled = plan.num_seqs == 0
    room = jnp.iinfo(jnp.int32).max - run.num_batched_tokens
    return RunResult(
        table=table,
        num_steps=run.num_steps + jnp.where(stalled, 0, 1),
        num_batched_tokens=run.num_batched_tokens
        + jnp.minimum(plan.num_batched_tokens, room),
        first_token_step=jnp.where(first, run.num_steps, run.first_token_step),
        finish_step=jnp.where(finished, run.num_steps, run.finish_step),
        num_snapshots=run.num_snapshots + landed,
        stalled=stalled,
    )
