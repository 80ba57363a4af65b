"""EQUAL_PROGRESS: all prefills advance by one unit a round until the budget ends.

The sequential rule makes rounds over the rows; in each, every row is offered its next
unit and takes it if the cost still fits. Until the budget runs out no offer is
refused, so the number of such full rounds is found by binary search over a closed
form. After the first refusal less than one unit is left: full units are refused for
ever, and only last, partial units can still be taken, each in the rest of that round
or in the next one.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.config import MAX_COUNT, UNLIMITED, RowWalk
from jaxsched.core.masking import saturating_sum
from jaxsched.scheduling.walk import walks_of

Array = jax.Array


def equal_progress(
    size_limit: Array,
    cost_limit: Array,
    offset: Array,
    unit: Array,
    capacity: Array,
    first_round: int,
    row_walk: RowWalk,
) -> Array:
    """Sizes after all rounds.

    After t accepted offers a row's size is `min(t * unit - offset, size_limit)` and
    its cost the same held at `cost_limit`.

    Args:
      size_limit: i32[R], tokens; 0 on rows that take no part.
      cost_limit: i32[R], tokens, at most `size_limit`.
      offset: i32[R], tokens by which a row stands past a unit boundary, below `unit`.
      unit: i32[], tokens >= 1.
      capacity: i32[], tokens >= 0 or UNLIMITED.
      first_round: rounds known to be affordable for all rows; at least 1 if any
        offset is positive.
      row_walk: static.

    Returns:
      i32[R], sizes in tokens.
    """

    def held(rounds: Array, limit: Array) -> Array:
        return jnp.clip(rounds * unit - offset, 0, limit)

    def total(rounds: Array) -> Array:
        return saturating_sum(held(rounds, cost_limit), 0, MAX_COUNT + 1)

    rounds = _first_round_at_capacity(
        total, cost_limit + offset, unit, capacity, first_round
    )
    spent = total(rounds)
    exhausted = (spent >= capacity) & (capacity != UNLIMITED)
    # Short of the capacity by less than a round: some rows take their next unit.
    done = rounds - 1
    now, after, beyond = (held(done + more, cost_limit) for more in range(3))
    extra, to_the_end = walks_of(row_walk).rounds_past_refusal(
        now, after, beyond, capacity - total(done)
    )
    # With tokens left, rows whose growth costs nothing (reuse) grow to their end.
    partial = jnp.where(to_the_end, size_limit, held(done + extra, size_limit))
    size = jnp.where(spent == capacity, held(rounds, size_limit), partial)
    return jnp.where(exhausted, size, size_limit)


def _first_round_at_capacity(total, reach, unit, capacity, first_round) -> Array:
    """Smallest number of rounds that spends the capacity, or completes every row."""
    completes = (jnp.max(reach, initial=0) + unit - 1) // unit
    # The row with most left to do takes a whole unit in every round but its first.
    spends = capacity // unit + 2
    high = jnp.maximum(jnp.minimum(completes, spends), first_round)

    def search(bounds):
        low, high = bounds
        middle = (low + high) // 2
        enough = total(middle) >= capacity
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    bounds = (jnp.int32(first_round), high.astype(jnp.int32))
    return lax.while_loop(lambda b: b[0] < b[1], search, bounds)[0]
