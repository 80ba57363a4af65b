"""Time in two 32-bit words is the same integer arithmetic, and jumps lose nothing."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched.simulation import replay_clock as clock
from jaxsched.simulation.replay_clock import Ticks

WORD = 2**32
EDGES = (0, 1, 2**16 - 1, 2**16, WORD - 1, WORD, WORD + 1, 2**63, 2**64 - 1)


def number(value: Ticks) -> np.ndarray:
    return clock.picoseconds(np.asarray(value.hi), np.asarray(value.lo))


def drawn(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2 ** draw.randint(1, 64)) for _ in range(300)]


def pairs():
    values = [*EDGES, *drawn(1)]
    others = [*reversed(EDGES), *drawn(2)]
    return values + [0] * 3, others + [5] * 3


def test_sums_differences_and_order():
    a, b = pairs()
    left, right = clock.ticks(a), clock.ticks(b)
    both = list(zip(a, b, strict=True))
    assert number(left).tolist() == a
    assert number(clock.add(left, right)).tolist() == [(x + y) % 2**64 for x, y in both]
    gap = clock.subtract(
        clock.ticks([max(p) for p in both]), clock.ticks([*map(min, both)])
    )
    assert number(gap).tolist() == [abs(x - y) for x, y in both]
    assert clock.less(left, right).tolist() == [x < y for x, y in both]
    assert number(clock.earlier(left, right)).tolist() == [*map(min, both)]
    assert int(number(clock.earliest(clock.ticks(a[5:])))) == min(a[5:])
    assert int(number(clock.never())) == clock.NEVER_PS


def test_products():
    a, b = pairs()
    words = [(x % WORD, y % WORD) for x, y in zip(a, b, strict=True)]
    left = jnp.asarray(np.array([x for x, _ in words], np.uint32))
    right = jnp.asarray(np.array([y for _, y in words], np.uint32))
    assert number(clock.product(left, right)).tolist() == [x * y for x, y in words]
    found = number(clock.times(clock.ticks(a), right)).tolist()
    assert found == [x * y % 2**64 for x, (_, y) in zip(a, words, strict=True)]


def test_a_stretch_costs_what_its_steps_cost():
    for count in (0, 1, 2, 77, clock.MAX_JUMP):
        want = sum(10**9 + 37 * step for step in range(count))
        found = clock.steps_cost(clock.ticks(10**9), clock.ticks(37), jnp.uint32(count))
        assert int(number(found)) == want


@pytest.fixture(scope="module")
def steps_until():
    return jax.jit(clock.steps_until)


def fewest(first, growth, gap, limit):
    over = 0
    for count in range(1, limit + 1):
        over += first + growth * (count - 1)
        if over >= gap:
            return count
    return limit


def test_the_fewest_steps_until_a_gap_is_over(steps_until):
    draw = random.Random(5)
    for _ in range(400):
        first = draw.randrange(1, 2 ** draw.randint(2, 40))
        growth = draw.choice((0, 1, first // 100, first))
        limit = draw.choice(
            (1, 63, 64, 65, 128, 4032, 4033, 4096, draw.randint(1, 4096))
        )
        count = draw.randint(1, limit + 1)
        edge = first * count + growth * count * (count - 1) // 2
        gap = max(1, edge + draw.choice((-1, 0, 1)))
        found = steps_until(
            clock.ticks(first), clock.ticks(growth), clock.ticks(gap), jnp.int32(limit)
        )
        assert int(found) == fewest(first, growth, gap, limit), (first, growth, gap)


def test_nothing_ahead_runs_to_the_limit(steps_until):
    found = steps_until(
        clock.ticks(clock.MAX_STEP_PS), clock.ticks(0), clock.never(), jnp.int32(4096)
    )
    assert int(found) == 4096
