"""What both rule sets of admission share: the draft, adapters, prefix deferral."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsched.core.config import NO_ID, Phase
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.capacity_needs import not_held, roles_of
from jaxsched.scheduling.capacity_state import (
    CapacityConfig,
    CapacityError,
    CapacityState,
    Verdict,
)
from jaxsched.scheduling.capacity_walk import Adapters, group_rows

Array = jax.Array


class Draft(NamedTuple):
    """A decision on every row, before it is put into a `CapacityResult`."""

    taken: Array  # bool[R]
    preempted: Array  # bool[R]
    verdict: Array  # i32[R]
    order: Array  # i32[R]
    preemption_order: Array  # i32[R]
    error: Array  # i32[]


def standing_verdict(table: RequestTable) -> Array:
    """Verdicts on the rows that no policy looks at, i32[R]."""
    empty = table.phase == Phase.EMPTY
    held = roles_of(table).alive & ~not_held(table)
    verdict = jnp.where(held, Verdict.HELD, Verdict.WRONG_PHASE)
    return jnp.where(empty, Verdict.EMPTY_ROW, verdict)


def adapters_of(
    table: RequestTable, state: CapacityState, config: CapacityConfig
) -> Adapters | None:
    """None without adapters: then no code is made for them."""
    if not config.lora:
        return None
    return Adapters.of(table.lora_id, state.lora_pages, state.max_lora_pages)


def first_computed(
    table: RequestTable, state: CapacityState, config: CapacityConfig, gated: Array
) -> tuple[Array, Array]:
    """First chunks that wait for a block of others, and those others wait for.

    Returns:
      deferred: bool[R]; registering: bool[R], first chunks with a key of their own.
    """
    none = jnp.zeros_like(gated)
    if not config.prefix_deferral:
        return none, none
    role = roles_of(table)
    keyed = (
        (state.num_windows == 1)
        & gated
        & (table.phase == Phase.PREFILL)
        & (state.new_block_key != NO_ID)
    )
    groups = group_rows(state.new_block_key, table.lora_id, keyed)
    seeded = groups.any_in_group(keyed & ~role.first_chunk)
    first = keyed & role.first_chunk
    registering = first & ~seeded & groups.is_first(first)
    return first & ~registering, registering


def encoder_error(state: CapacityState, asks: Array, error: Array) -> Array:
    wrong = jnp.any(asks) & ~state.has_cross_pool
    return jnp.where(wrong, CapacityError.ENCODER_WITHOUT_CROSS_POOL, error)
