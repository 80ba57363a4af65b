"""Invariants of every plan, on generated tables.

Scheduled tokens stay within the budget and rows within their number; a pending point
is a chunk end or an emitted position; no scheduled row has zero tokens; each step
schedules something or names what it waits for; and a plan does not depend on padding
rows, on the bucket, on `jit` against `vmap`, or on the other tables of a batch.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxsched
from generators import CONFIGS, make_case, random_cases
from oracles import records
from planner_checks import check_plan
from planner_harness import (
    PLAN_FIELDS,
    config_of,
    quick_compile,
    run_cases,
    stack_budgets,
    stack_tables,
    to_answers,
)
from test_planner_exhaustive import name_of

SHRINKING = (
    ("jaxsched", "force_chunk", "cut", 8),
    ("jaxsched", "equal_progress", "emit", 2),
    ("tensorrt_llm", "first_come_first_served", "cut", 8),
)
"""Programs that hypothesis searches; all of them are covered by seeded tables."""

COUNTS = st.integers(0, 20) | st.integers(0, records.MAX_COUNT)


@st.composite
def rows(draw):
    """Any row that the constructors accept."""
    phase = draw(st.sampled_from(records.PHASES[1:] + ("prefill",) * 4))
    prompt = draw(st.integers(1, 24) | st.integers(1, records.MAX_COUNT))
    computed = min(prompt + draw(st.integers(0, 9)), records.MAX_COUNT)
    if phase in ("prefill", "encode"):
        computed = draw(st.integers(0, prompt - 1))
    return records.Row(
        phase=phase,
        num_prompt_tokens=prompt,
        num_computed_tokens=computed,
        num_cached_tokens=draw(st.sampled_from((computed, 0))),
        num_reusable_tokens=draw(COUNTS),
        num_draft_tokens=draw(st.integers(0, 6)),
        num_encoder_tokens=draw(COUNTS),
        beam_width=draw(st.integers(1, 3)),
        lora_id=draw(st.integers(-1, 2)),
        in_flight=draw(st.booleans()) if draw(st.booleans()) else False,
        # A fine interval of a huge prompt would keep the checks busy for hours.
        snapshot_interval=draw(st.sampled_from((0, max(1, prompt // 7), 2**28))),
        snapshot_points=draw(st.lists(st.integers(0, 30), max_size=3)),
    )


@st.composite
def cases(draw, config):
    """Any table of up to four rows under limits of at least one token."""
    limits = st.integers(1, 40) | st.integers(1, records.MAX_COUNT)
    limits |= st.just(records.UNLIMITED)
    unit = st.integers(1, 9)
    if draw(st.booleans()):
        unit = st.integers(2**24, 2**27)
    drawn = draw(st.lists(rows(), min_size=1, max_size=4))
    return make_case(
        config,
        [dataclasses.replace(row, id=i) for i, row in enumerate(drawn)],
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(limits),
        max_context_length=draw(limits),
        chunk_unit_size=draw(unit),
    )


@functools.cache
def single_planner(config):
    """The planner of one table, without `vmap`."""
    return quick_compile(functools.partial(jaxsched.schedule, config=config))


def plan_single(case, num_rows):
    """The plan of one table in a bucket of `num_rows`, with a leading axis of 1."""
    table, budget = stack_tables([case], num_rows, 3), stack_budgets([case])
    table, budget = jax.tree.map(lambda array: array[0], (table, budget))
    plan = jax.device_get(single_planner(config_of(case))(table, budget))
    return jax.tree.map(lambda array: np.asarray(array)[None], plan)


@pytest.mark.parametrize("config", SHRINKING[:2], ids=name_of)
def test_any_small_table(config):
    @settings(max_examples=100)
    @given(cases(config))
    def check(case):
        check_plan(case, to_answers([case], plan_single(case, 4))[0])

    check()


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_seeded_tables(config):
    drawn = random_cases("properties", 700, config, max_rows=16, max_points=8)
    for case, answer in zip(drawn, to_answers(drawn, run_cases(drawn)), strict=True):
        check_plan(case, answer)


def assert_equal_plans(left, right, num_rows):
    """Every field agrees on the first `num_rows` rows, and nothing runs behind them."""
    for field in PLAN_FIELDS:
        one, other = getattr(left, field), getattr(right, field)
        if one.ndim > 1:
            assert (other[:, one.shape[1] :] == _padding_value(field)).all(), field
            one, other = one[:, :num_rows], other[:, :num_rows]
        np.testing.assert_array_equal(one, other, err_msg=field)


def _padding_value(field):
    if field == "reason":
        return records.EMPTY_ROW
    absent = field in ("order", "snapshot_point", "emit_points")
    return records.NO_ID if absent else 0


@pytest.mark.parametrize("config", SHRINKING[:2], ids=name_of)
def test_the_bucket_and_vmap_change_nothing(config):
    drawn = random_cases("buckets", 60, config, max_rows=4, max_points=3)
    in_batch = run_cases(drawn)
    for index, case in enumerate(drawn):
        alone = plan_single(case, 4)
        assert_equal_plans(alone, plan_single(case, 8), 4)
        batched = jax.tree.map(lambda array, i=index: array[i : i + 1], in_batch)
        assert_equal_plans(alone, batched, 4)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_the_other_tables_of_a_batch_change_nothing(config):
    drawn = random_cases("batch", 300, config, max_rows=16, max_points=8)
    forwards, backwards = run_cases(drawn), run_cases(drawn[::-1])
    for field in PLAN_FIELDS:
        np.testing.assert_array_equal(
            getattr(forwards, field), getattr(backwards, field)[::-1], err_msg=field
        )


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_empty_rows_in_between_change_nothing(config):
    drawn = random_cases("holes", 300, config, max_rows=16, max_points=8)
    dense = [
        dataclasses.replace(case, rows=[r for r in case.rows if r.phase != "empty"])
        for case in drawn
    ]
    assert sum(len(case.rows) for case in dense) < sum(len(c.rows) for c in drawn)
    with_holes = to_answers(drawn, run_cases(drawn))
    without = to_answers(dense, run_cases(dense))
    for case, holed, answer in zip(drawn, with_holes, without, strict=True):
        kept = [i for i, row in enumerate(case.rows) if row.phase != "empty"]
        for field in PLAN_FIELDS:
            one, other = getattr(holed, field), getattr(answer, field)
            if field == "order":
                one = [kept.index(i) for i in one if i != records.NO_ID]
                other = [i for i in other if i != records.NO_ID]
            elif isinstance(one, list):
                one = [one[i] for i in kept]
            assert one == other, field


@pytest.mark.slow
@pytest.mark.parametrize("config", SHRINKING, ids=name_of)
def test_many_small_tables(config):
    @settings(max_examples=2000)
    @given(cases(config))
    def check(case):
        check_plan(case, to_answers([case], plan_single(case, 4))[0])

    check()


@pytest.mark.slow
def test_without_jit_the_plan_is_the_same():
    config = SHRINKING[0]
    case = random_cases("eager", 1, config, max_rows=4, max_points=3)[0]
    table, budget = stack_tables([case], 4, 3), stack_budgets([case])
    table, budget = jax.tree.map(lambda array: array[0], (table, budget))
    plan = jaxsched.schedule(*jax.device_put((table, budget)), config_of(case))
    eager = jax.tree.map(lambda array: np.asarray(array)[None], plan)
    assert_equal_plans(plan_single(case, 4), eager, 4)
