"""Admission: which requests may hold cache memory in the next step, who gives it up.

One pass is one pure function of the request table and the state of the pools; it
reads no bulk memory and can be jitted, vmapped and swept. Reserving the blocks is the
cache's part.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsched.core.checks import check_table
from jaxsched.core.config import Phase, Reason, Rules
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling import capacity_jaxsched, capacity_tensorrt_llm
from jaxsched.scheduling.capacity_needs import required_columns
from jaxsched.scheduling.capacity_state import (
    CapacityConfig,
    CapacityResult,
    CapacityState,
    Verdict,
    check_capacity_state,
)

Array = jax.Array


def admit(
    table: RequestTable, state: CapacityState, config: CapacityConfig
) -> CapacityResult:
    """Decides who may hold memory in the next step.

    Args:
      table: R requests in first-come order.
      state: what the pools have and the rows hold, with W windows.
      config: static choices.

    Returns:
      One verdict a row, and the order in which to reserve and to preempt.

    Raises:
      ValueError: at trace time, if shapes or dtypes do not fit together.

    Source of the `tensorrt_llm` rules: the capacity scheduler of TensorRT-LLM after
    PR #16427.
    """
    check_table(table)
    check_capacity_state(state, table)
    rules = capacity_jaxsched
    if config.rules == Rules.TENSORRT_LLM:
        rules = capacity_tensorrt_llm
    draft = rules.decide(table, state, config)
    required = required_columns(table, state, config)
    transfer = draft.taken & (table.phase == Phase.DISAGG_DECODE_INIT)
    return CapacityResult(
        admitted=draft.taken & ~transfer,
        disagg_decode_init=transfer,
        preempted=draft.preempted,
        verdict=draft.verdict.astype(jnp.int32),
        order=draft.order,
        preemption_order=draft.preemption_order,
        required_blocks=required[:, :-2],
        required_cross_blocks=required[:, -2],
        required_state_slots=required[:, -1],
        error=draft.error.astype(jnp.int32),
    )


def hold_unadmitted(table: RequestTable, result: CapacityResult) -> RequestTable:
    """The table as `schedule` reads it: rows that are not in are held.

    A row that is too large for the pools keeps that as its reason.
    """
    out = result.verdict != Verdict.ADMITTED
    free = table.hold_reason == Reason.SCHEDULED
    why = jnp.where(
        result.verdict == Verdict.TOO_LARGE, Reason.TOO_LARGE, Reason.NOT_ADMITTED
    )
    reason = jnp.where(out & free, why, table.hold_reason)
    return dataclasses.replace(table, hold_reason=reason.astype(jnp.int32))
