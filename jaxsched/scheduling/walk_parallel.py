"""Walks over rows without a loop over rows: running sums and a first fit.

Everything before the first row that does not fit is a running sum. Behind it less
than one unit is left, which a first fit deals in at most 31 rounds.
"""

import jax
import jax.numpy as jnp

from jaxsched.core.config import NO_ID, Reason
from jaxsched.core.masking import (
    count_before,
    exceeds,
    first_true,
    iota,
    offset_in,
    read_at,
    spend,
    wide_cumsum,
)
from jaxsched.scheduling.first_fit import first_fit
from jaxsched.scheduling.walk import Deal, Walk, to_boundary

Array = jax.Array


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
    rows = iota(tokens.shape[0])
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


def deal_in_order(
    full: Array,
    cost: Array,
    position: Array,
    unit: Array,
    capacity: Array,
    max_rows: Array,
) -> Deal:
    """Deals a capacity: whole sizes while they fit, else cut to a unit boundary.

    A row behind a cut one may still be served, whole or up to its next boundary.

    Args:
      full: i32[R], the size a row takes if it fits; 0 on rows that take no part.
      cost: i32[R], what that size is charged, 0 <= cost <= full. Rows with cost 0
        always take their full size.
      position: i32[R], tokens; a cut chunk ends on a multiple of the unit counted
        from position 0, and is charged its size.
      unit: i32[], tokens >= 1.
      capacity: i32[], tokens >= 0 or UNLIMITED.
      max_rows: i32[], rows that may get tokens.
    """
    rows = iota(full.shape[0])
    total = wide_cumsum(cost)
    stop = first_true(exceeds(total, capacity))
    spent = (total - cost.astype(jnp.uint32)).astype(jnp.int32)
    left = spend(capacity, read_at(spent, stop))
    cut = to_boundary(position, left, unit)
    left = jnp.where(stop < full.shape[0], left - read_at(cut, stop), 0)
    distance = unit - offset_in(position, unit)
    realign = jnp.where((distance < unit) & (distance < cost), distance, 0)
    granted = first_fit(cost, realign, stop + 1, left)
    whole = (rows < stop) | (cost == 0) | (granted == cost)
    size = jnp.where(whole, full, granted)
    size = jnp.where(rows == stop, cut, size)
    seat_left = count_before(size > 0) < max_rows
    return Deal(jnp.where(seat_left, size, 0), seat_left)


def deal_wanted(wanted: Array, capacity: Array) -> Array:
    """Gives each row what it wants, or what is left, in order.

    Args:
      wanted: i32[R], tokens >= 0, together below 2**32.
      capacity: i32[], tokens or UNLIMITED.

    Returns:
      i32[R], tokens.
    """
    total = wide_cumsum(wanted)
    left = capacity.astype(jnp.uint32)
    before = jnp.minimum(total - wanted.astype(jnp.uint32), left)
    return (jnp.minimum(total, left) - before).astype(jnp.int32)


def rounds_past_refusal(
    now: Array, after: Array, beyond: Array, left: Array
) -> tuple[Array, Array]:
    """Rounds that rows still take once the first offer has been refused.

    Offers of a whole unit are refused from then on, so a row takes at most the rest
    of this round and a last, partial offer of the next one: a first fit over the rows
    in rotated order, from the row behind the refused one.

    Args:
      now: i32[R], cost of what the rows have.
      after: i32[R], cost one round later.
      beyond: i32[R], cost two rounds later.
      left: i32[], capacity left; not enough for every row's next offer.

    Returns:
      i32[R] rounds taken, 0 to 2, and bool[R], whether capacity was left behind the
      row's second round.
    """
    rows, size = iota(now.shape[0]), now.shape[0]
    this_offer, next_offer = after - now, beyond - after
    running = wide_cumsum(this_offer)
    refused = first_true(running > jnp.maximum(left, 0).astype(jnp.uint32))
    spent = (running - this_offer.astype(jnp.uint32)).astype(jnp.int32)
    left = jnp.where(refused < size, left - read_at(spent, refused), 0)

    ahead, behind = rows > refused, rows < refused
    offer = jnp.where(behind, next_offer, jnp.where(ahead, this_offer, 0))
    rotated = jnp.roll(offer, -(refused + 1))
    granted = first_fit(rotated, jnp.zeros_like(offer), jnp.int32(0), left)
    granted = jnp.roll(granted, refused + 1)
    accepted = granted == offer

    left_this = left - jnp.sum(jnp.where(ahead, granted, 0))
    left_next = left_this - jnp.sum(jnp.where(behind, granted, 0))
    took_this = behind | (ahead & accepted)
    took_next = (left_this > 0) & jnp.where(behind, accepted, took_this)
    rounds = took_this.astype(jnp.int32) + (took_this & took_next).astype(jnp.int32)
    return rounds, took_next & (left_next > 0)


def order_by_group(group: Array, num_groups: int) -> Array:
    """Indices of the rows by group, in row order inside a group; i32[R].

    Args:
      group: i32[R]; rows of `num_groups` are left out.
      num_groups: static and small.

    Returns:
      i32[R], NO_ID behind the last row.
    """
    rows, size = iota(group.shape[0]), group.shape[0]
    # Few groups: a running count in each is cheaper than sorting by them.
    members = (group[None, :] == iota(num_groups)[:, None]).astype(jnp.int32)
    up_to = jnp.cumsum(members, axis=1)
    count = up_to[:, -1:]
    place = up_to - members + jnp.cumsum(count, axis=0) - count
    place = jnp.sum(members * place, axis=0)
    place = jnp.where(group < num_groups, place, size)
    return jnp.full_like(rows, NO_ID).at[place].set(rows, mode="drop")
