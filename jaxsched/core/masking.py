"""Small array idioms that the whole package shares.

Sums over rows are taken in uint32 where they may pass int32: a caller that looks only
at the *first* place where the sum passes an int32 limit reads exact values, because
everything before it is below 2**31 and the first sum above it is below 2**32. Later
entries may wrap; nobody reads them.
"""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def iota(size: int) -> Array:
    """0, 1, ..., size - 1, i32[size]."""
    return lax.iota(jnp.int32, size)


def first_true(mask: Array) -> Array:
    """Index of the first true entry of bool[N], N where there is none; i32[]."""
    size = mask.shape[0]
    return jnp.min(jnp.where(mask, iota(size), size), initial=size)


def read_at(values: Array, index: Array, fill: int = 0) -> Array:
    """`values[index]`, or `fill` where the index lies outside; i32[]."""
    return values.at[index].get(mode="fill", fill_value=fill)


def wide_cumsum(counts: Array) -> Array:
    """Running sum of i32[..., N] counts >= 0 over the last axis, u32[..., N]."""
    return jnp.cumsum(counts.astype(jnp.uint32), axis=-1)


def exceeds(total: Array, limit: Array) -> Array:
    """Whether a uint32 total is above an i32 limit that may be UNLIMITED; bool."""
    unlimited = limit == jnp.iinfo(jnp.int32).max
    return (total > jnp.maximum(limit, 0).astype(jnp.uint32)) & ~unlimited


def spend(limit: Array, amount: Array) -> Array:
    """What is left of a limit, never below 0; UNLIMITED stays UNLIMITED; i32[]."""
    unlimited = limit == jnp.iinfo(jnp.int32).max
    return jnp.where(unlimited, limit, jnp.maximum(limit - amount, 0))


def count_before(mask: Array) -> Array:
    """How many entries of bool[N] are true before each index; i32[N]."""
    ones = mask.astype(jnp.int32)
    return jnp.cumsum(ones) - ones


def saturating_sum(counts: Array, axis: int, limit: int) -> Array:
    """Sum of counts >= 0 along an axis, held at `limit`; exact below it.

    Needs `2 * limit < 2**31`, so that one addition of two held sums cannot wrap.
    """
    held = jnp.minimum(counts, limit)
    return lax.reduce(
        held,
        jnp.int32(0),
        lambda a, b: jnp.minimum(a + b, jnp.int32(limit)),
        (axis,),
    )


def round_down(value: Array, unit: Array) -> Array:
    """Largest multiple of `unit` that is not above `value` >= 0; 0 for -1.

    The truncating division is one instruction; a flooring one is ten.
    """
    return _div(value, unit) * unit


def round_up_gap(value: Array, unit: Array) -> Array:
    """What `value` >= 0 lacks to the next multiple of `unit`; 0 on a multiple."""
    gap = unit - offset_in(value, unit)
    return jnp.where(gap == unit, 0, gap)


def offset_in(value: Array, unit: Array) -> Array:
    """How far `value` >= 0 lies past the last multiple of `unit`."""
    return value - round_down(value, unit)


def _div(value: Array, unit: Array) -> Array:
    return lax.div(*jnp.broadcast_arrays(value, unit))
