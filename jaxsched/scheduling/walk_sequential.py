"""Walks over rows as one `lax.scan` each: row after row, as the rules are stated.

A CPU compiles each loop into one kernel that spends a few nanoseconds a row, where
the parallel forms pay for dozens of small steps. On an accelerator every row would be
a kernel launch: use `walk_parallel` there. Arguments and results are described there.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.config import NO_ID, UNLIMITED, Reason
from jaxsched.core.masking import iota
from jaxsched.scheduling.walk import Deal, Walk, to_boundary

Array = jax.Array


def take_row(state: tuple, tokens: Array, counted: Array, tested: Array):
    """One row of `take_in_order`; state: tokens left, seats left, walk has ended."""
    left, seats, stopped = state
    free = seats > 0
    reached = ~stopped & free
    over = reached & tested & (tokens > left)
    taken = reached & counted & ~over
    reason = jnp.where(over, Reason.NO_BUDGET, Reason.BEAM_WIDTH)
    reason = jnp.where(stopped, Reason.BEHIND_BLOCKED, reason)
    reason = jnp.where(free, reason, Reason.BATCH_FULL)
    left = spend_exactly(left, jnp.where(taken, tokens, 0))
    seats -= taken.astype(jnp.int32)
    return (left, seats, stopped | over), Walk(taken, reason, reached)


def take_in_order(
    tokens: Array, counted: Array, tested: Array, budget: Array, max_rows: Array
) -> Walk:
    """Takes the counted rows in order until one does not fit."""
    start = (budget, max_rows, jnp.asarray(False))
    return lax.scan(
        lambda state, row: take_row(state, *row), start, (tokens, counted, tested)
    )[1]


def deal_row(state: tuple, full: Array, cost: Array, position: Array, unit: Array):
    """One row of `deal_in_order`; state: tokens left, seats left."""
    left, seats = state
    fits = cost <= left
    cut = to_boundary(position, left, unit)
    seat_left = seats > 0
    size = jnp.where(seat_left, jnp.where(fits, full, cut), 0)
    left = spend_exactly(left, jnp.where(fits, cost, cut))
    seats -= (size > 0).astype(jnp.int32)
    return (left, seats), Deal(size, seat_left)


def deal_in_order(
    full: Array,
    cost: Array,
    position: Array,
    unit: Array,
    capacity: Array,
    max_rows: Array,
) -> Deal:
    """Deals a capacity: whole sizes while they fit, else cut to a unit boundary."""
    return lax.scan(
        lambda state, row: deal_row(state, *row, unit),
        (capacity, max_rows),
        (full, cost, position),
    )[1]


def deal_wanted(wanted: Array, capacity: Array) -> Array:
    """Gives each row what it wants, or what is left, in order."""

    def step(left, wanted):
        given = jnp.minimum(wanted, left)
        return spend_exactly(left, given), given

    return lax.scan(step, capacity, wanted)[1]


def rounds_past_refusal(
    now: Array, after: Array, beyond: Array, left: Array
) -> tuple[Array, Array]:
    """Rounds that rows still take once the first offer has been refused."""

    def step(left, row):
        offer, open_ = row
        taken = open_ & (offer <= left)
        return left - jnp.where(taken, offer, 0), taken

    everyone = jnp.ones_like(now, bool)
    left_this, took_this = lax.scan(step, left, (after - now, everyone))
    going_on = took_this & (left_this > 0)
    left_next, took_next = lax.scan(step, left_this, (beyond - after, going_on))
    rounds = took_this.astype(jnp.int32) + took_next.astype(jnp.int32)
    return rounds, took_next & (left_next > 0)


def order_by_group(group: Array, num_groups: int) -> Array:
    """Indices of the rows by group, in row order inside a group; i32[R]."""
    rows, size = iota(group.shape[0]), group.shape[0]
    groups = iota(num_groups)
    count = jnp.sum((group[None, :] == groups[:, None]).astype(jnp.int32), axis=1)

    def step(places, group):
        # One place beyond the groups' takes the rows that are left out.
        place = jnp.where(group < num_groups, places[group], size)
        return places.at[group].add(1), place

    first = jnp.append(jnp.cumsum(count) - count, size)
    place = lax.scan(step, first, group)[1]
    return jnp.full_like(rows, NO_ID).at[place].set(rows, mode="drop")


def spend_exactly(left: Array, amount: Array) -> Array:
    """What is left after a grant that fitted; UNLIMITED stays UNLIMITED."""
    return jnp.where(left == UNLIMITED, left, left - amount)
