"""A whole run in one loop equals planning and advancing step by step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsched as js
from planner_harness import quick_compile

LIMITS = js.budget(max_num_batched_tokens=64, max_num_seqs=3, chunk_unit_size=16)
RECORDS = [
    {"num_prompt_tokens": 100, "max_new_tokens": 3, "snapshot_interval": 32},
    {"num_prompt_tokens": 40, "max_new_tokens": 6},
    {"num_prompt_tokens": 7, "max_new_tokens": 1},
    {"num_prompt_tokens": 64, "max_new_tokens": 4, "snapshot_interval": 16},
]


def _table(**extra):
    return js.request_table([{**record, **extra} for record in RECORDS], num_rows=8)


@functools.cache
def _planned(config):
    return quick_compile(functools.partial(js.schedule, config=config))


advance = quick_compile(js.advance)


def _by_hand(table, config):
    first, done, landed, step = {}, {}, {}, 0
    while np.any(~np.isin(table.phase, (js.Phase.EMPTY, js.Phase.FINISHED))):
        plan = _planned(config)(table, LIMITS)
        after = advance(table, plan)
        for row in range(table.num_rows):
            if after.num_output_tokens[row] and row not in first:
                first[row] = step
            if after.phase[row] == js.Phase.FINISHED and row not in done:
                done[row] = step
            points = [int(p) for p in plan.emit_points[row] if p != js.NO_ID]
            if plan.snapshot_point[row] != js.NO_ID:
                points.append(int(plan.snapshot_point[row]))
            landed.setdefault(row, []).extend(points)
        table, step = after, step + 1
    return table, first, done, landed, step


@pytest.mark.parametrize("mode", ["cut", "emit"])
def test_a_run_equals_its_steps(mode):
    config = js.SchedulerConfig(snapshot_mode=mode, max_emit_points=2)
    run = quick_compile(functools.partial(js.run_to_completion, config=config))
    result = run(_table(), LIMITS, max_steps=1000)
    table, first, done, landed, steps = _by_hand(_table(), config)
    rows = range(len(RECORDS))
    assert int(result.num_steps) == steps
    assert result.first_token_step[:4].tolist() == [first[row] for row in rows]
    assert result.finish_step[:4].tolist() == [done[row] for row in rows]
    assert result.num_snapshots[:4].tolist() == [len(landed[row]) for row in rows]
    assert landed[0] == [32, 64, 96] and landed[3] == [16, 32, 48, 64]
    assert not result.stalled
    jax.tree.map(np.testing.assert_array_equal, result.table, table)


def test_rollout_keeps_every_plan():
    config = js.SchedulerConfig()
    roll = quick_compile(functools.partial(js.rollout, config=config, num_steps=40))
    table, plans = roll(_table(), LIMITS)
    assert plans.order.shape == (40, 8)
    total = int(jnp.sum(plans.num_scheduled_tokens))
    decodes = sum(record["max_new_tokens"] - 1 for record in RECORDS)
    assert total == 100 + 40 + 7 + 64 + decodes
    assert table.phase[:4].tolist() == [js.Phase.FINISHED] * 4
    assert int(plans.num_seqs[-1]) == 0


def test_a_run_that_waits_says_so():
    config = js.SchedulerConfig()
    held = _table(hold_reason="not_admitted")
    run = quick_compile(functools.partial(js.run_to_completion, config=config))
    result = run(held, LIMITS, max_steps=10)
    assert result.stalled and int(result.num_steps) == 0
    short = run(_table(), LIMITS, max_steps=2)
    assert not short.stalled and int(short.num_steps) == 2


def test_accepted_drafts_and_stop_tokens_advance_a_decode():
    record = {"num_prompt_tokens": 8, "num_computed_tokens": 8, "phase": "decode"}
    table = js.request_table(
        [{**record, "num_draft_tokens": 3, "num_output_tokens": 1}] * 2
    )
    plan = _planned(js.SchedulerConfig())(table, LIMITS)
    after = advance(
        table,
        plan,
        num_accepted_tokens=jnp.int32([2, 0]),
        stop_mask=jnp.asarray([False, True]),
        num_draft_tokens=jnp.int32([5, 5]),
    )
    assert after.num_computed_tokens.tolist() == [11, 9]
    assert after.num_output_tokens.tolist() == [4, 2]
    assert after.phase.tolist() == [js.Phase.DECODE, js.Phase.FINISHED]
    assert after.num_draft_tokens.tolist() == [5, 5]
    assert advance(table, plan).num_draft_tokens.tolist() == [0, 0]
