"""Who runs in a step, and with how many tokens: the parts both rule sets share.

`microbatch_jaxsched` and `microbatch_tensorrt_llm` each turn a request table into a
`Draft` of a plan; `scheduler.schedule` completes it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsched.core.config import Phase, Reason, SchedulerConfig
from jaxsched.core.masking import (
    exceeds,
    first_true,
    read_at,
    wide_cumsum,
)
from jaxsched.core.requests import RequestTable

Array = jax.Array


class Draft(NamedTuple):
    """A plan in the making."""

    size: Array  # i32[R]  tokens, 0 on rows that got nothing
    num_draft_tokens: Array  # i32[R]
    taken: Array  # bool[R]
    reason: Array  # i32[R]  a Reason
    split_last_chunks: Array  # bool[]  last chunks go behind the others
    num_batched_tokens: Array  # i32[]
    error: Array  # i32[]  a PlanError


class Walk(NamedTuple):
    """Rows taken in order until the budget breaks or the seats are taken."""

    taken: Array  # bool[R]
    reason: Array  # i32[R]  for the rows not taken
    reached: Array  # bool[R]  looked at before the walk ended


def standing_reason(table: RequestTable, config: SchedulerConfig) -> Array:
    """Why a row cannot be scheduled whatever the budget; SCHEDULED: it can; i32[R]."""
    phase = table.phase
    schedulable = (phase == Phase.DECODE) | (
        (phase == Phase.PREFILL) & (table.num_remaining_tokens > 0)
    )
    if config.encoder_decoder:
        schedulable |= phase == Phase.ENCODE
    reason = jnp.where(table.in_flight, Reason.IN_FLIGHT, table.hold_reason)
    reason = jnp.where(schedulable, reason, Reason.WRONG_PHASE)
    return jnp.where(phase == Phase.EMPTY, Reason.EMPTY_ROW, reason)


def first_chunk_reuse(table: RequestTable) -> Array:
    """The reuse estimate where it counts: on first chunks; i32[R]."""
    first = table.num_computed_tokens == table.num_cached_tokens
    return jnp.where(first, jnp.maximum(table.num_reusable_tokens, 0), 0)


def take_in_order(
    tokens: Array, counted: Array, tested: Array, budget: Array, max_rows: Array
) -> Walk:
    """Takes the counted rows in order until one does not fit.

    Args:
      tokens: i32[R], what a row would take, >= 0.
      counted: bool[R], rows that can be taken.
      tested: bool[R], rows whose tokens are held against the budget; the first that
        does not fit ends the walk, also if it is not counted.
      budget: i32[], tokens or UNLIMITED.
      max_rows: i32[], rows; reaching it ends the walk too.
    """
    # Tokens and seats share one running sum: a sum costs more for its steps than rows.
    taken = jnp.stack([jnp.where(counted, tokens, 0), counted.astype(jnp.int32)])
    before = wide_cumsum(taken) - taken.astype(jnp.uint32)
    broken = tested & exceeds(before[0] + tokens.astype(jnp.uint32), budget)
    stop = first_true(broken)
    seats = before[1].astype(jnp.int32)
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    # Past the break nobody sits down, so the seats there are those at the break.
    seats = jnp.where(rows > stop, read_at(seats, stop), seats)
    free = seats < max_rows
    reason = jnp.where(rows < stop, Reason.BEAM_WIDTH, Reason.NO_BUDGET)
    reason = jnp.where(rows > stop, Reason.BEHIND_BLOCKED, reason)
    return Walk(
        taken=counted & (rows < stop) & free,
        reason=jnp.where(free, reason, Reason.BATCH_FULL),
        reached=(rows <= stop) & free,
    )


def batch_beam_width(table: RequestTable, decodes: Array) -> Array:
    """Beam width of the first decode row, the one width that its batch has; i32[]."""
    return read_at(table.beam_width, first_true(decodes))
