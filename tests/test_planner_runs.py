"""Invariant: whole runs make progress, and `advance` moves rows as the oracle says.

Tables are planned and advanced until nothing runs. Then everything is finished or
names why not. On the way each step schedules something, every published point of a
chunked prompt is stood on or emitted, and plans and tables equal the oracle's.
"""

import functools
import random

import jax
import numpy as np
import pytest

import jaxsched
from generators import CONFIGS, make_case, random_cases
from oracles import planner, records
from oracles.planner_advance import advance
from oracles.planner_common import exclusion, points_of
from planner_checks import check_plan
from planner_harness import (
    BATCH,
    PLAN_FIELDS,
    batch_planner,
    config_of,
    fill_batch,
    quick_compile,
    stack_budgets,
    stack_tables,
    to_answers,
)
from test_planner_exhaustive import name_of

QUICK = (CONFIGS[4], CONFIGS[5], CONFIGS[7], CONFIGS[10])
TABLES = 40


@functools.cache
def batch_advance():
    """The vmapped `advance`; JAX compiles it once for each width of emitted points."""

    def step(table, plan, accepted, drafts, stopped):
        return jaxsched.advance(
            table,
            plan,
            num_accepted_tokens=accepted,
            num_draft_tokens=drafts,
            stop_mask=stopped,
        )

    return quick_compile(jax.vmap(step)), quick_compile(jax.vmap(jaxsched.advance))


def small_cases(config, count):
    """Tables of up to five short rows, limits of at least one token."""
    draw = random.Random(f"runs/{config}")
    cases = []
    for _ in range(count):
        rows = [_small_row(draw, i) for i in range(draw.randint(1, 5))]
        limit = draw.choice((1, 2, 3, 5, 9, 20, records.UNLIMITED))
        cases.append(
            make_case(
                config,
                rows,
                max_num_seqs=draw.choice((1, 2, 3, 9)),
                max_num_batched_tokens=limit,
                max_context_length=draw.choice((limit, limit, 4, records.UNLIMITED)),
                chunk_unit_size=draw.choice((1, 2, 3, 4, 8)),
            )
        )
    return cases


def _small_row(draw, index):
    prompt = draw.randint(1, 14)
    computed = draw.choice((0, draw.randint(0, prompt - 1)))
    return records.Row(
        id=index,
        phase=draw.choice(("prefill", "prefill", "prefill", "decode", "encode")),
        num_prompt_tokens=prompt,
        num_computed_tokens=computed,
        num_cached_tokens=computed,
        num_reusable_tokens=draw.choice((0, 0, draw.randint(0, 14))),
        num_draft_tokens=draw.choice((0, 2)),
        num_encoder_tokens=draw.randint(0, 6),
        beam_width=draw.choice((1, 1, 2)),
        lora_id=draw.randint(-1, 1),
        max_new_tokens=draw.randint(1, 4),
        in_flight=draw.random() < 0.05,
        hold_reason=draw.choice((0,) * 20 + (records.HELD,)),
        snapshot_interval=draw.choice((0, 3, 4)),
        snapshot_points=draw.choice(([], [2, 7], [9, 5, 5])),
    )


def run(cases, visit):
    """Steps all cases until none schedules anything; `visit(cases, answers)` sees all.

    Cases move on by the oracle's `advance`, the tables by the package's; `visit` is
    told both, and the tables are held against the cases after every step.
    """
    program = batch_planner(config_of(cases[0]))
    budgets = fill_batch(stack_budgets(cases))
    table = fill_batch(stack_tables(cases))
    for _ in range(1 + sum_of_work(cases)):
        plans = program(table, budgets)
        host = jax.tree.map(lambda a, n=len(cases): np.asarray(a)[:n], plans)
        answers = to_answers(cases, host)
        visit(cases, answers)
        if not any(answer.num_seqs for answer in answers):
            return cases
        table = batch_advance()[1](table, plans)
        cases = [advance(c, a) for c, a in zip(cases, answers, strict=True)]
        assert_table_holds(table, cases)
    raise AssertionError("still scheduling after more steps than there are tokens")


def sum_of_work(cases):
    """An upper bound of steps: one token a step, row after row."""
    return max(
        sum(1 + row.num_prompt_tokens + row.max_new_tokens for row in case.rows)
        for case in cases
    )


def assert_table_holds(table, cases):
    """Every field of the advanced tables equals that of the advanced cases."""
    wanted = stack_tables(cases)
    for field in ("phase", "num_computed_tokens", "num_output_tokens"):
        got = np.asarray(getattr(table, field))[: len(cases)]
        np.testing.assert_array_equal(got, getattr(wanted, field), err_msg=field)
    jax.tree.map(
        lambda got, want: np.testing.assert_array_equal(
            np.asarray(got)[: len(want)], want
        ),
        table,
        wanted,
    )


def check_run(config, count):
    """A whole run of `count` tables with every check on the way."""
    start = small_cases(config, count)
    passed = [[set() for _ in case.rows] for case in start]

    def visit(cases, answers):
        for at, (case, answer) in enumerate(zip(cases, answers, strict=True)):
            assert answer == planner.plan(case)
            check_plan(case, answer)
            for index, seen in enumerate(passed[at]):
                seen.add(answer.snapshot_point[index])
                seen.update(answer.emit_points[index])

    for case, first, seen in zip(run(start, visit), start, passed, strict=True):
        for row, begun, points in zip(case.rows, first.rows, seen, strict=True):
            if row.phase != "finished":
                continue
            assert row.num_output_tokens == max(1, begun.max_new_tokens)
            if config[1] != "none" and begun.phase != "decode":
                ahead = {p for p in points_of(begun) if p > begun.num_computed_tokens}
                assert ahead == points - {records.NO_ID}
        check_leftovers(case)


def check_leftovers(case):
    """What is not finished is held, or needs a larger limit and says so."""
    answer = planner.plan(case)
    for row, reason in zip(case.rows, answer.reason, strict=True):
        assert reason == (exclusion(case, row) or records.TOO_LARGE)


@pytest.mark.parametrize("config", QUICK, ids=name_of)
def test_runs_end_with_nothing_left_to_do(config):
    check_run(config, TABLES)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS[4:], ids=name_of)
def test_many_runs_end_with_nothing_left_to_do(config):
    check_run(config, BATCH)


def test_advance_with_acceptance_drafts_and_stops():
    """One step each of random tables, with everything that a model can report."""
    config = CONFIGS[5]
    cases = random_cases("advance", 500, config, max_rows=16, max_points=8)
    table, size = fill_batch(stack_tables(cases)), (BATCH, 16)
    plans = batch_planner(config_of(cases[0]))(table, fill_batch(stack_budgets(cases)))
    answers = to_answers(cases, jax.tree.map(lambda a: np.asarray(a)[:500], plans))
    draw = np.random.default_rng(5)
    accepted = draw.integers(0, 1 + np.asarray(plans.num_draft_tokens), dtype=np.int32)
    drafts = draw.integers(0, 5, size, dtype=np.int32)
    stopped = draw.random(size) < 0.2
    moved = batch_advance()[0](table, plans, accepted, drafts, stopped)
    expected = [
        advance(
            case,
            answer,
            accepted[at, : len(case.rows)].tolist(),
            drafts[at, : len(case.rows)].tolist(),
            stopped[at, : len(case.rows)].tolist(),
        )
        for at, (case, answer) in enumerate(zip(cases, answers, strict=True))
    ]
    real = np.asarray(table.phase)[:500] != records.PHASES.index("empty")
    wanted = stack_tables(expected)
    for field in ("phase", "num_computed_tokens", "num_output_tokens"):
        got = np.asarray(getattr(moved, field))[:500]
        np.testing.assert_array_equal(got[real], getattr(wanted, field)[real])
    got = np.asarray(moved.num_draft_tokens)[:500]
    np.testing.assert_array_equal(got[real], wanted.num_draft_tokens[real])


def test_the_runs_compare_every_field():
    """Guards the comparison: an answer differs as soon as one field does."""
    case = small_cases(CONFIGS[5], 1)[0]
    for field in PLAN_FIELDS:
        answer = planner.plan(case)
        setattr(answer, field, "other")
        assert answer != planner.plan(case)
