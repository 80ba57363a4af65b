"""Walking rows in order against several pools at once, without a loop over the rows.

Every rule here is a *prefix* rule: rows are taken until the first that does not fit.
Whether a row fits depends on running sums alone, so the first that does not is found
by a reduction. Adapters are the exception (a row whose adapter does not fit is passed
over); they are dealt by `first_fit`, in at most 31 rounds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.config import NO_ID, UNLIMITED
from jaxsched.core.masking import iota
from jaxsched.scheduling.capacity_needs import SATURATED
from jaxsched.scheduling.first_fit import first_fit

Array = jax.Array

_LIMB = 16


def exact_cumsum(counts: Array) -> Array:
    """Inclusive running sum along axis 0 of i32[R, ...], held within +-SATURATED.

    Exact for any int32 counts and up to 2**15 rows: the sum is carried in two limbs
    and held only at the end, so it may pass the limit and come back.
    """
    return _joined(jnp.cumsum(_limbs(counts), axis=1))


def exact_sum(counts: Array) -> Array:
    """The last entry of `exact_cumsum`."""
    return _joined(jnp.sum(_limbs(counts), axis=1))


def _limbs(counts: Array) -> Array:
    return jnp.stack([counts & (2**_LIMB - 1), counts >> _LIMB])


def _joined(limbs: Array) -> Array:
    low, high = limbs[0], limbs[1] + (limbs[0] >> _LIMB)
    most = SATURATED >> _LIMB
    value = (jnp.clip(high, -most - 1, most) << _LIMB) | (low & (2**_LIMB - 1))
    value = jnp.where(high > most, SATURATED, value)
    return jnp.where(high < -most - 1, -SATURATED, jnp.maximum(value, -SATURATED))


def before(inclusive: Array) -> Array:
    """An inclusive running sum shifted by one row: the sum before each row."""
    return jnp.concatenate([jnp.zeros_like(inclusive[:1]), inclusive[:-1]])


class Groups(NamedTuple):
    """Rows in groups of equal keys: `leader` is the first row of a row's group."""

    leader: Array  # i32[R]  R on rows without a key

    def any_in_group(self, mask: Array) -> Array:
        """Whether any row of the row's group is true; bool[R]."""
        size = self.leader.shape[0]
        found = jnp.zeros(size, jnp.bool_).at[self.leader].max(mask, mode="drop")
        return found.at[self.leader].get(mode="fill", fill_value=False)

    def is_first(self, mask: Array) -> Array:
        """Rows that are the first true one of their group; bool[R]."""
        size = self.leader.shape[0]
        rows = iota(size)
        first = jnp.full(size, size, jnp.int32)
        first = first.at[self.leader].min(jnp.where(mask, rows, size), mode="drop")
        return first.at[self.leader].get(mode="fill", fill_value=size) == rows


def group_rows(key: Array, other: Array, mask: Array) -> Groups:
    """Groups the rows of bool[R] `mask` by the pair (key, other), both i32[R]."""
    size = key.shape[0]
    rows = iota(size)
    absent = (~mask).astype(jnp.int32)
    absent, key, other, row = lax.sort((absent, key, other, rows), num_keys=4)
    new = (key != before(key)) | (other != before(other)) | (rows == 0)
    start = lax.cummax(jnp.where(new, rows, 0))
    leader = jnp.where(absent == 0, row[start], size)
    return Groups(jnp.zeros(size, jnp.int32).at[row].set(leader))


class Adapters(NamedTuple):
    """Adapters of the rows and what they cost; an adapter is paid for once."""

    groups: Groups
    pages: Array  # i32[R]  0 where there is no adapter
    limit: Array  # i32[]

    @staticmethod
    def of(lora_id: Array, pages: Array, limit: Array) -> "Adapters":
        """Adapters of a table; NO_ID: none."""
        has = lora_id != NO_ID
        groups = group_rows(lora_id, jnp.zeros_like(lora_id), has)
        return Adapters(groups, jnp.where(has, pages, 0), limit)

    def paid_by(self, taken: Array) -> Array:
        """Pages that the rows of a mask pay, i32[R]: the first of each adapter does."""
        return jnp.where(self.groups.is_first(taken), self.pages, 0)

    def left_after(self, taken: Array) -> Array:
        """Pages left when the rows of a mask are in, i32[]; may be negative."""
        limited = jnp.minimum(self.limit, SATURATED)
        rest = limited - exact_sum(self.paid_by(taken))
        return jnp.where(self.limit == UNLIMITED, UNLIMITED, rest)

    def fits(self, candidates: Array, taken: Array) -> Array:
        """Rows whose adapter finds room when candidates are walked in order; bool[R].

        Args:
          candidates: bool[R], the rows that are walked.
          taken: bool[R], rows that are in already, their adapters paid for.
        """
        left = self.left_after(taken)
        loaded = self.groups.any_in_group(taken)
        asks = candidates & ~loaded
        first = self.groups.is_first(asks)
        price = jnp.where(first, self.pages, 0)
        zero = jnp.zeros_like(price)
        granted = first_fit(price, zero, jnp.int32(0), jnp.maximum(left, 0))
        paid = self.groups.any_in_group(first & (granted == price))
        return loaded | paid | (self.pages == 0)


class Prefix(NamedTuple):
    """How a walk over candidates ended."""

    taken: Array  # bool[R]
    stop: Array  # i32[]  the row that did not fit, R if all did
    full: Array  # bool[]  it found no seat; otherwise no room


def listed(mask: Array) -> Array:
    """The row numbers of a mask in order, then NO_ID; i32[R]."""
    size = mask.shape[0]
    place = jnp.cumsum(mask.astype(jnp.int32)) - 1
    place = jnp.where(mask, place, size)
    return jnp.full(size, NO_ID, jnp.int32).at[place].set(iota(size), mode="drop")


def listed_last(mask: Array) -> Array:
    """The row numbers of a mask from the last to the first, then NO_ID; i32[R]."""
    size = mask.shape[0]
    from_end = listed(jnp.flip(mask))
    return jnp.where(from_end == NO_ID, NO_ID, size - 1 - from_end)
