"""Both forms of every walk equal the plain walk, row after row, and so do plans."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsched as js
import planner_harness as harness
from generators import CONFIGS, random_cases
from jaxsched.core.config import MAX_COUNT, UNLIMITED
from jaxsched.scheduling import walk_parallel, walk_sequential

ROWS, CASES = 24, 300
FORMS = (walk_parallel, walk_sequential)
forms = pytest.mark.parametrize("form", FORMS, ids=["parallel", "sequential"])


def _many(function, cases):
    """The function over stacked cases, compiled once."""
    columns = [jnp.asarray(np.stack(column)) for column in zip(*cases, strict=True)]
    return harness.quick_compile(jax.vmap(function))(*columns)


def deal(full, cost, position, unit, capacity, max_rows):
    sizes, left, seats = [], capacity, 0
    for want, charge, start in zip(full, cost, position, strict=True):
        size = want
        if charge > left:
            size = charge = max((start + left) // unit * unit - start, 0)
        if seats == max_rows:
            size = charge = 0
        seats += size > 0
        left -= 0 if capacity == UNLIMITED else charge
        sizes.append(size)
    return sizes


@forms
@pytest.mark.parametrize("largest", [100, 2**29])
def test_dealing_in_order(form, largest):
    cases = []
    for seed in range(CASES):
        draw = np.random.default_rng(seed)
        full = draw.integers(1, largest, ROWS, dtype=np.int32)
        full[draw.random(ROWS) < 0.2] = 0
        cost = np.where(draw.random(ROWS) < 0.8, full, full // 3).astype(np.int32)
        position = draw.integers(0, largest, ROWS, dtype=np.int32)
        unit = draw.choice([1, 8, 64])
        capacity = draw.choice([0, unit, 3 * unit, largest, 4 * largest, UNLIMITED])
        capacity = min(capacity, MAX_COUNT) if capacity != UNLIMITED else capacity
        numbers = (unit, capacity, draw.integers(1, ROWS + 1))
        cases.append((full, cost, position, *map(np.int32, numbers)))
    found = _many(lambda *case: form.deal_in_order(*case).size, cases)
    right = [deal(*(np.asarray(part).tolist() for part in case)) for case in cases]
    np.testing.assert_array_equal(found, right)


@forms
@pytest.mark.parametrize("capacity", [0, 7, 40, MAX_COUNT, UNLIMITED])
def test_giving_what_is_wanted(form, capacity):
    wanted = np.random.default_rng(capacity).integers(0, 9, ROWS, dtype=np.int32)
    found = form.deal_wanted(jnp.asarray(wanted), jnp.int32(capacity))
    before = np.cumsum(wanted) - wanted
    np.testing.assert_array_equal(found, np.clip(capacity - before, 0, wanted))


@forms
def test_rounds_past_the_first_refusal(form):
    """Row after row: the next offer if it fits, twice over."""
    unit, cases, right = 16, [], []
    for seed in range(CASES):
        draw = np.random.default_rng(seed)
        limit = draw.integers(0, 5 * unit, ROWS)
        done = int(draw.integers(1, 4))
        now, after, beyond = (
            np.minimum((done + more) * unit, limit).astype(np.int32)
            for more in range(3)
        )
        short = int((after - now).sum())
        if not short:
            continue
        left = int(draw.integers(1, short)) if short > 1 else 0
        cases.append((now, after, beyond, np.int32(left)))
        right.append(_rounds(now.tolist(), after.tolist(), beyond.tolist(), left))
    rounds, to_the_end = _many(form.rounds_past_refusal, cases)
    for row, (taken, last) in enumerate(right):
        np.testing.assert_array_equal(rounds[row], taken)
        np.testing.assert_array_equal(to_the_end[row], last)


def _rounds(now, after, beyond, left):
    taken = [0] * len(now)
    for row in range(len(now)):
        if after[row] - now[row] <= left:
            taken[row], left = 1, left - (after[row] - now[row])
    if left == 0:
        return taken, [False] * len(now)
    for row in range(len(now)):
        if taken[row] and beyond[row] - after[row] <= left:
            taken[row], left = 2, left - (beyond[row] - after[row])
    return taken, [rounds == 2 and left > 0 for rounds in taken]


@forms
def test_ordering_by_group(form):
    group = np.random.default_rng(5).integers(0, 5, 40, dtype=np.int32)
    found = form.order_by_group(jnp.asarray(group), 4)
    right = [row for wanted in range(4) for row in range(40) if group[row] == wanted]
    assert found.tolist() == right + [js.NO_ID] * (40 - len(right))


QUICK = {("jaxsched", "force_chunk", "cut"), ("tensorrt_llm", "equal_progress", "cut")}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            config,
            id="-".join(config[:3]),
            marks=() if config[:3] in QUICK else pytest.mark.slow,
        )
        for config in CONFIGS
    ],
)
def test_plans_are_the_same_in_both_forms(config):
    cases = random_cases(7, harness.BATCH, config, harness.ROWS, harness.POINTS)
    stacked = harness.stack_tables(cases), harness.stack_budgets(cases)
    chosen = harness.config_of(cases[0])
    plans = [
        harness.batch_planner(dataclasses.replace(chosen, row_walk=walk))(*stacked)
        for walk in js.RowWalk
    ]
    jax.tree.map(np.testing.assert_array_equal, *plans)
