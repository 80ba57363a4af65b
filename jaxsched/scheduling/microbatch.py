"""Who runs in a step, and with how many tokens: the parts both rule sets share.

`microbatch_jaxsched` and `microbatch_tensorrt_llm` each turn a request table into a
`Draft` of a plan; `scheduler.schedule` completes it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsched.core.config import Phase, Reason, SchedulerConfig
from jaxsched.core.masking import first_true, read_at
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


def batch_beam_width(table: RequestTable, decodes: Array) -> Array:
    """Beam width of the first decode row, the one width that its batch has; i32[]."""
    return read_at(table.beam_width, first_true(decodes))
