"""`schedule`: from a request table and a budget to a plan; `advance`: the next table.

Both are pure, have fixed shapes, and hold no loop over requests. Call them inside your
own jitted step; `config` is static.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.checks import check_budget, check_plan, check_table
from jaxsched.core.config import (
    NO_ID,
    Phase,
    Rules,
    SchedulerConfig,
    SnapshotMode,
)
from jaxsched.core.masking import iota
from jaxsched.core.plan import Budget, Plan
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling import microbatch_jaxsched, microbatch_tensorrt_llm
from jaxsched.scheduling.snapshots import is_snapshot_point, next_snapshot_points
from jaxsched.scheduling.walk import walks_of

Array = jax.Array

_NUM_GROUPS = 4  # encoder inputs, unfinished prefills, last chunks, decodes
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
    draft = _MICROBATCH[config.rules](table, budget, config)
    phase, size = table.phase, draft.size
    prefill = draft.taken & (phase == Phase.PREFILL)
    end = table.num_computed_tokens + jnp.where(prefill, size, 0)
    last = prefill & (end == table.num_prompt_tokens)
    on_point = prefill & is_snapshot_point(table, end)
    encode = draft.taken & (phase == Phase.ENCODE)
    decode = draft.taken & (phase == Phase.DECODE)
    group = jnp.where(last & draft.split_last_chunks, 2, 1)
    group = jnp.where(encode, 0, jnp.where(decode, 3, group))
    return Plan(
        num_scheduled_tokens=size,
        num_draft_tokens=draft.num_draft_tokens,
        is_last_chunk=last,
        snapshot_point=jnp.where(on_point, end, NO_ID),
        emit_points=_emit_points(table, end, config),
        prefill_mask=prefill,
        decode_mask=decode,
        encode_mask=encode,
        preempted_mask=jnp.zeros_like(prefill),
        order=_output_order(draft.taken, group, table.lora_id, config),
        reason=draft.reason,
        num_seqs=jnp.sum(draft.taken.astype(jnp.int32)),
        num_batched_tokens=draft.num_batched_tokens,
        error=draft.error,
    )


def _emit_points(table: RequestTable, end: Array, config: SchedulerConfig) -> Array:
    """Published points strictly inside each row's chunk, i32[R, E], NO_ID padded."""
    width = config.num_emit_columns
    if config.snapshot_mode == SnapshotMode.CUT:
        return jnp.full((table.num_rows, width), NO_ID, jnp.int32)
    points = next_snapshot_points(table, table.num_computed_tokens, width)
    return jnp.where(points < end[:, None], points, NO_ID)


def _output_order(
    taken: Array, group: Array, lora_id: Array, config: SchedulerConfig
) -> Array:
    """Rows by group, then adapter, then row; NO_ID behind the last; i32[R]."""
    order_by_group = walks_of(config.row_walk).order_by_group
    group = jnp.where(taken, group, _NUM_GROUPS)
    if not config.group_by_lora:
        return order_by_group(group, _NUM_GROUPS)
    rows = _rows_by_adapter(lora_id)
    order = order_by_group(group[rows], _NUM_GROUPS)
    return jnp.where(order == NO_ID, NO_ID, rows[order])


def _rows_by_adapter(lora_id: Array) -> Array:
    """Row indices by adapter, rows of one adapter in order; i32[R]."""
    rows = iota(lora_id.shape[0])
    if lora_id.shape[0] > 1 << 16:
        return lax.sort((lora_id, rows), num_keys=1, is_stable=True)[1]
    # Adapter and row fit into one key, and a sort without payload is much cheaper.
    key = ((lora_id + 1).astype(jnp.uint32) << 16) | rows.astype(jnp.uint32)
    return (lax.sort(key) & 0xFFFF).astype(jnp.int32)


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
