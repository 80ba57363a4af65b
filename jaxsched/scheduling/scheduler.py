"""`schedule`: from a request table and a budget to a plan; `advance`: the next table.

Both are pure, have fixed shapes, and hold no loop over requests. Call them inside your
own jitted step; `config` is static.
"""

import jax
import jax.numpy as jnp

from jaxsched.core.checks import check_budget, check_plan, check_table
from jaxsched.core.config import NO_ID, Phase, RowWalk, Rules, SchedulerConfig
from jaxsched.core.plan import Budget, Plan
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling import microbatch_jaxsched, microbatch_tensorrt_llm
from jaxsched.scheduling.output_order import (
    CHUNKS,
    DECODES,
    ENCODES,
    LAST_CHUNKS,
    NUM_GROUPS,
    output_order,
)
from jaxsched.scheduling.row_by_row import plan_rows
from jaxsched.scheduling.snapshots import emit_points, is_snapshot_point

Array = jax.Array

_DEFAULT_CONFIG = SchedulerConfig()
_MICROBATCH = {
    Rules.JAXSCHED: microbatch_jaxsched.plan_microbatch,
    Rules.TENSORRT_LLM: microbatch_tensorrt_llm.plan_microbatch,
}


def schedule(
    table: RequestTable, budget: Budget, config: SchedulerConfig = _DEFAULT_CONFIG
) -> Plan:
    """Plans one step: who runs, with how many tokens, ending where.

    Args:
      table: R requests in first-come order, snapshot points published.
      budget: limits of the step, scalars.
      config: static.

    Returns:
      A `Plan` with one row for each row of the table. Positions in it are absolute:
      a row's chunk covers `num_scheduled_tokens` from `num_computed_tokens` on. A
      reuse *estimate* only lowers what the chunk is charged; once the cache knows
      what it holds, it moves `num_computed_tokens` and `num_cached_tokens` instead.

    Raises:
      ValueError: at trace time, if a field has the wrong shape or dtype.
    """
    check_table(table)
    check_budget(budget)
    if config.row_walk == RowWalk.SEQUENTIAL and config.rules == Rules.JAXSCHED:
        return plan_rows(table, budget, config)
    draft = _MICROBATCH[config.rules](table, budget, config)
    phase, size = table.phase, draft.size
    prefill = draft.taken & (phase == Phase.PREFILL)
    end = table.num_computed_tokens + jnp.where(prefill, size, 0)
    last = prefill & (end == table.num_prompt_tokens)
    on_point = prefill & is_snapshot_point(table, end)
    encode = draft.taken & (phase == Phase.ENCODE)
    decode = draft.taken & (phase == Phase.DECODE)
    group = jnp.where(last & draft.split_last_chunks, LAST_CHUNKS, CHUNKS)
    group = jnp.where(encode, ENCODES, jnp.where(decode, DECODES, group))
    group = jnp.where(draft.taken, group, NUM_GROUPS)
    return Plan(
        num_scheduled_tokens=size,
        num_draft_tokens=draft.num_draft_tokens,
        is_last_chunk=last,
        snapshot_point=jnp.where(on_point, end, NO_ID),
        emit_points=emit_points(table, end, config),
        prefill_mask=prefill,
        decode_mask=decode,
        encode_mask=encode,
        preempted_mask=jnp.zeros_like(prefill),
        order=output_order(group, table.lora_id, config.group_by_lora, config.row_walk),
        reason=draft.reason,
        num_seqs=jnp.sum(draft.taken.astype(jnp.int32)),
        num_batched_tokens=draft.num_batched_tokens,
        error=draft.error,
    )


def advance(
    table: RequestTable,
    plan: Plan,
    *,
    num_accepted_tokens: Array | None = None,
    stop_mask: Array | None = None,
    num_draft_tokens: Array | None = None,
) -> RequestTable:
    """The table after the step that `plan` describes has run.

    An encoded row becomes a prefill. A prefill moves on by its chunk; on its last
    chunk it samples its first token and becomes a decode. A decode samples one token
    and keeps its accepted drafts. A row is finished once it has `max_new_tokens`
    outputs or is named in `stop_mask`. The reuse estimate ends with the first chunk.

    Args:
      table: the table that was planned.
      plan: its plan.
      num_accepted_tokens: i32[R], draft tokens accepted on decode rows; default none.
      stop_mask: bool[R], rows that met a stop token in this step; default none.
      num_draft_tokens: i32[R], drafts proposed for the next step; default: rows that
        sampled have used theirs up and propose none.

    Raises:
      ValueError: at trace time, if shapes do not agree.
    """
    check_table(table)
    check_plan(plan, table)
    zero = jnp.zeros_like(table.phase)
    accepted = zero if num_accepted_tokens is None else num_accepted_tokens
    step = jnp.where(plan.prefill_mask, plan.num_scheduled_tokens, 0)
    step = jnp.where(plan.decode_mask, 1 + accepted, step)
    sampled = jnp.where(plan.decode_mask, 1 + accepted, 0)
    sampled = jnp.where(plan.is_last_chunk, 1, sampled)
    outputs = table.num_output_tokens + sampled
    done = (sampled > 0) & (outputs >= table.max_new_tokens)
    if stop_mask is not None:
        done |= plan.scheduled_mask & stop_mask
    phase = jnp.where(plan.encode_mask, Phase.PREFILL, table.phase)
    phase = jnp.where(plan.is_last_chunk, Phase.DECODE, phase)
    phase = jnp.where(done, Phase.FINISHED, phase)
    if num_draft_tokens is None:
        num_draft_tokens = jnp.where(sampled > 0, 0, table.num_draft_tokens)
    return table.replace(
        phase=phase,
        num_computed_tokens=table.num_computed_tokens + step,
        num_output_tokens=outputs,
        num_reusable_tokens=jnp.where(plan.prefill_mask, 0, table.num_reusable_tokens),
        num_draft_tokens=num_draft_tokens,
    )
