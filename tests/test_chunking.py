"""`chunk_sizes` gives what whole plans give, and vmaps over every number it takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsched as js
from planner_harness import quick_compile

REMAINING = [100, 40, 7, 64, 0, 300]
COMPUTED = [0, 8, 3, 64, 20, 5]
POINTS = [[64, 90], [16, -1], [-1, -1], [100, -1], [-1, -1], [64, 128]]


def _arrays():
    return (jnp.int32(REMAINING), jnp.int32(COMPUTED), jnp.int32(POINTS))


def _planned(rules, policy, capacity, unit, interval):
    records = [
        {
            "num_prompt_tokens": computed + max(remaining, 1),
            "num_computed_tokens": computed,
            "num_cached_tokens": computed,
            "snapshot_points": [point for point in points if point > 0],
            "snapshot_interval": interval,
            "num_reusable_tokens": 3,
            "hold_reason": "scheduled" if remaining else "held",
        }
        for remaining, computed, points in zip(REMAINING, COMPUTED, POINTS, strict=True)
    ]
    table = js.request_table(records, num_points=2)
    limits = js.budget(
        max_num_batched_tokens=capacity, chunk_unit_size=unit, strict=False
    )
    config = js.SchedulerConfig(rules=rules, chunking_policy=policy)
    plan = _schedule(config)(table, limits)
    return plan.num_scheduled_tokens[: len(REMAINING)]


@functools.cache
def _schedule(config):
    return quick_compile(functools.partial(js.schedule, config=config))


@pytest.mark.parametrize(
    ("policy", "rules"),
    [
        ("force_chunk", "jaxsched"),
        ("first_come_first_served", "tensorrt_llm"),
        ("equal_progress", "jaxsched"),
        ("equal_progress", "tensorrt_llm"),
    ],
)
def test_sizes_are_those_of_a_plan(policy, rules):
    capacities, units, intervals = (
        jnp.int32(values).ravel()
        for values in np.meshgrid([10, 60, 150, 400], [8, 32], [0, 24])
    )
    sizes = functools.partial(
        js.chunk_sizes, num_reusable_tokens=3, rules=rules, policy=policy
    )
    many = quick_compile(
        jax.vmap(
            lambda capacity, unit, interval: sizes(
                *_arrays(), capacity, unit, snapshot_interval=interval
            )
        )
    )(capacities, units, intervals)
    for found, *numbers in zip(many, capacities, units, intervals, strict=True):
        capacity, unit, interval = map(int, numbers)
        right = _planned(rules, policy, capacity, unit, interval)
        np.testing.assert_array_equal(found, right)


def test_a_long_prompt_at_a_short_interval_is_like_any_other():
    """A million tokens, a point every 16: no list, the same program."""
    sizes = quick_compile(functools.partial(js.chunk_sizes, capacity=8192))
    empty = jnp.full((2, 1), js.NO_ID, jnp.int32)
    for computed in (0, 16, 999_990):
        position = jnp.int32([computed, 5])
        remaining = 1_000_000 - position
        found = sizes(
            remaining, position, empty, chunk_unit_size=16, snapshot_interval=16
        )
        right = [min(16 - computed % 16, 1_000_000 - computed), 11]
        assert found.tolist() == right
