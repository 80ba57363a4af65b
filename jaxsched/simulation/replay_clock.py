"""Time as whole picoseconds in 64 bits, made of two uint32 words, and the cost line.

Integer time makes a run reproducible to the last digit, and makes a jump over many
equal steps the same as taking them one by one. Nanoseconds would be too coarse (one
token of context costs about two), a float would not add up the same in any order, and
64-bit integers would need a global switch that callers may not want.

`N` in a shape stands for any shape.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.core.config import MAX_COUNT

Array = jax.Array

PS_PER_MS = 10**9
PS_PER_US = 10**6
PS_PER_NS = 10**3
NEVER_PS = 2**64 - 1
"""A time that does not come."""

MAX_STEP_PS = 2**50
"""Longest step, some 19 minutes: a jump of MAX_JUMP steps then stays below 2**62."""

MAX_JUMP = 4096
"""Steps of one jump at most."""

_MS_SHIFT, _MS_ODD, _DIGIT = 9, 1_953_125, 11
_WORD = 64  # MAX_JUMP is searched in two rounds of this many candidates


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Ticks:
    """A time or a duration in picoseconds: `hi * 2**32 + lo`."""

    hi: Array  # u32[N]
    lo: Array  # u32[N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CostLine:
    """What a step takes: `base + per_token * tokens + per_context * context`."""

    base: Ticks  # of every step
    per_token: Array  # u32[]  ps a scheduled token, drafts included
    per_context: Array  # u32[]  ps a token of context that a scheduled row reads


def ticks(picoseconds) -> Ticks:
    """Python ints or a NumPy array of them, in [0, 2**64), as `Ticks`."""
    values = np.asarray(picoseconds, np.uint64)
    return Ticks(
        jnp.asarray((values >> np.uint64(32)).astype(np.uint32)),
        jnp.asarray(values.astype(np.uint32)),
    )


def picoseconds(hi: np.ndarray, lo: np.ndarray) -> np.ndarray:
    """The words of `Ticks` on the host as one uint64 array."""
    return (hi.astype(np.uint64) << np.uint64(32)) | lo.astype(np.uint64)


def add(a: Ticks, b: Ticks) -> Ticks:
    """a + b."""
    lo = a.lo + b.lo
    carry = (lo < a.lo).astype(jnp.uint32)
    return Ticks(a.hi + b.hi + carry, lo)


def subtract(a: Ticks, b: Ticks) -> Ticks:
    """a - b, for a >= b."""
    borrow = (a.lo < b.lo).astype(jnp.uint32)
    return Ticks(a.hi - b.hi - borrow, a.lo - b.lo)


def less(a: Ticks, b: Ticks) -> Array:
    """a < b; bool[N]."""
    return (a.hi < b.hi) | ((a.hi == b.hi) & (a.lo < b.lo))


def select(mask: Array, a: Ticks, b: Ticks) -> Ticks:
    """a where the mask holds, else b."""
    return Ticks(jnp.where(mask, a.hi, b.hi), jnp.where(mask, a.lo, b.lo))


def earlier(a: Ticks, b: Ticks) -> Ticks:
    """The smaller one."""
    return select(less(a, b), a, b)


def earliest(times: Ticks) -> Ticks:
    """The smallest of Ticks[n]."""
    hi = jnp.min(times.hi)
    top = jnp.uint32(0xFFFFFFFF)
    return Ticks(hi, jnp.min(jnp.where(times.hi == hi, times.lo, top)))


def never() -> Ticks:
    """NEVER_PS, later than every time that comes."""
    top = jnp.uint32(0xFFFFFFFF)
    return Ticks(top, top)


def product(a: Array, b: Array) -> Ticks:
    """a * b of uint32, exact, from products of 16-bit halves."""
    low, shift = jnp.uint32(0xFFFF), jnp.uint32(16)
    a_lo, a_hi, b_lo, b_hi = a & low, a >> shift, b & low, b >> shift
    cross, other = a_hi * b_lo, a_lo * b_hi
    bottom = a_lo * b_lo
    middle = (bottom >> shift) + (cross & low) + (other & low)
    return Ticks(
        a_hi * b_hi + (cross >> shift) + (other >> shift) + (middle >> shift),
        (bottom & low) | (middle << shift),
    )


def times(a: Ticks, count: Array) -> Ticks:
    """a * count, modulo 2**64."""
    low = product(a.lo, count)
    return Ticks(low.hi + a.hi * count, low.lo)


def step_cost(cost: CostLine, tokens: Array, context: Array) -> Ticks:
    """What one step of u32 tokens and u32 context takes."""
    return add(
        add(cost.base, product(cost.per_token, tokens)),
        product(cost.per_context, context),
    )


def steps_cost(first: Ticks, growth: Ticks, count: Array) -> Ticks:
    """What `count` steps take when the first takes `first` and each one `growth` more.

    count * first + growth * count * (count - 1) / 2, for count >= 0 and <= MAX_JUMP.
    """
    pairs = (count * (count - jnp.uint32(1))) >> jnp.uint32(1)
    return add(times(first, count), times(growth, pairs))


def steps_until(first: Ticks, growth: Ticks, gap: Ticks, limit: Array) -> Array:
    """The fewest steps after which `gap` is over, at most `limit`; i32[].

    Args:
      first: what the first step takes.
      growth: what each step takes more than the one before.
      gap: a duration above 0.
      limit: i32[] in [1, MAX_JUMP]; costs beyond it are not looked at.
    """
    words = jnp.arange(1, _WORD, dtype=jnp.int32) * _WORD
    base = _WORD * _count_early(first, growth, gap, limit, words)
    singles = base + jnp.arange(1, _WORD, dtype=jnp.int32)
    return base + 1 + _count_early(first, growth, gap, limit, singles)


def _count_early(
    first: Ticks, growth: Ticks, gap: Ticks, limit: Array, counts: Array
) -> Array:
    """How many of the ascending step counts end before both the gap and the limit."""
    over = steps_cost(first, growth, counts.astype(jnp.uint32))
    early = less(over, gap) & (counts < limit)
    # Past the limit a cost may have wrapped, which must not count as early again.
    return jnp.sum(early.astype(jnp.int32))


def milliseconds(time: Ticks) -> Array:
    """Whole milliseconds, rounded down and held at MAX_COUNT; i32[N].

    A long division in digits of 11 bits: 10**9 = 2**9 * 1953125.
    """
    top = time.hi >> jnp.uint32(_MS_SHIFT)
    low = (time.hi << jnp.uint32(32 - _MS_SHIFT)) | (time.lo >> jnp.uint32(_MS_SHIFT))
    digit = jnp.uint32((1 << _DIGIT) - 1)
    digits = (
        top >> jnp.uint32(12),
        (top >> jnp.uint32(1)) & digit,
        ((top & jnp.uint32(1)) << jnp.uint32(10)) | (low >> jnp.uint32(22)),
        (low >> jnp.uint32(11)) & digit,
        low & digit,
    )
    rest = jnp.zeros_like(low)
    over = jnp.zeros_like(low)
    quotient = jnp.zeros_like(low)
    for value in digits:
        rest = (rest << jnp.uint32(_DIGIT)) | value
        over = over | (quotient >> jnp.uint32(32 - _DIGIT))
        quotient = (quotient << jnp.uint32(_DIGIT)) + rest // jnp.uint32(_MS_ODD)
        rest = rest % jnp.uint32(_MS_ODD)
    most = jnp.uint32(MAX_COUNT)
    held = jnp.where(over > 0, most, jnp.minimum(quotient, most))
    return held.astype(jnp.int32)
