"""First fit in rounds equals walking the rows one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched.core.config import MAX_COUNT
from jaxsched.scheduling.first_fit import first_fit

ROWS = 24


def walk(offer, fallback, start, left):
    granted = [0] * len(offer)
    for row in range(start, len(offer)):
        if 0 < offer[row] <= left:
            granted[row] = offer[row]
        elif offer[row] > 0 and 0 < fallback[row] <= left:
            granted[row] = fallback[row]
        left -= granted[row]
    return granted


def _draw(seed, largest):
    draw = np.random.default_rng(seed)
    offer = draw.integers(0, largest, ROWS, dtype=np.int32)
    offer = np.where(draw.random(ROWS) < 0.2, 0, offer)
    fallback = draw.integers(0, np.maximum(offer, 1), dtype=np.int32)
    return draw, offer, np.where(draw.random(ROWS) < 0.5, 0, fallback)


@pytest.mark.parametrize("largest", [4, 64, MAX_COUNT])
def test_first_fit_equals_the_walk(largest):
    fit = jax.jit(jax.vmap(first_fit))
    cases = []
    for seed in range(400):
        draw, offer, fallback = _draw(seed, largest)
        start, left = draw.integers(0, ROWS + 1), draw.integers(0, 2 * largest)
        cases.append((offer, fallback, np.int32(start), np.int32(left)))
    found = fit(*(jnp.asarray(np.stack(column)) for column in zip(*cases, strict=True)))
    right = [walk(*(np.asarray(part).tolist() for part in case)) for case in cases]
    np.testing.assert_array_equal(found, right)


def test_every_halving_is_needed_and_enough():
    """1, 63, 1, 62, ... keeps the rest falling slowly: the worst case for a jump."""
    offer = np.ravel([[1, 64 - step] for step in range(ROWS // 2)]).astype(np.int32)
    none = np.zeros_like(offer)
    found = first_fit(
        jnp.asarray(offer), jnp.asarray(none), jnp.int32(0), jnp.int32(63)
    )
    np.testing.assert_array_equal(found, walk(offer, none, 0, 63))
