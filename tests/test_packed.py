"""The buffer form plans exactly what the array form plans."""

import dataclasses

import jax
import numpy as np

import jaxsched as js
from planner_harness import quick_compile

CONFIG = js.SchedulerConfig(snapshot_mode="emit", max_emit_points=3)
RECORDS = [
    {"num_prompt_tokens": 700, "snapshot_interval": 64, "requested_points": [9, 650]},
    {"num_prompt_tokens": 30, "num_computed_tokens": 30, "phase": "decode"},
    {"num_prompt_tokens": 90, "in_flight": True},
    {"num_prompt_tokens": 500, "lora_id": 4, "snapshot_points": [100, 400]},
    {"num_prompt_tokens": 60, "hold_reason": "held"},
]


@quick_compile
def _planned(table, limits):
    return js.schedule(table, limits, CONFIG)


def _filled():
    planner = js.HostPlanner(CONFIG, 8, num_points=4, num_requested_points=2)
    table = js.request_table(RECORDS, num_points=4, num_requested_points=2)
    limits = js.budget(max_num_batched_tokens=512, chunk_unit_size=32)
    for value, views in ((table, planner.requests), (limits, planner.limits)):
        for field in dataclasses.fields(value):
            views[field.name][...] = np.asarray(getattr(value, field.name))
    return planner, table, limits


def test_the_plan_is_the_same_in_every_field():
    planner, table, limits = _filled()
    found, right = planner.plan(), _planned(table, limits)
    for field in dataclasses.fields(right):
        here = getattr(found, field.name)
        wanted = np.asarray(getattr(right, field.name))
        np.testing.assert_array_equal(here, wanted, err_msg=field.name)
        assert here.dtype == wanted.dtype and here.shape == wanted.shape
    assert int(found.num_seqs) == 3


def test_an_earlier_plan_does_not_change_with_the_buffer():
    planner, _, _ = _filled()
    first = jax.tree.map(np.copy, planner.plan())
    again = planner.plan()
    planner.requests["phase"][...] = js.Phase.FINISHED
    empty = planner.plan()
    assert int(empty.num_seqs) == 0
    jax.tree.map(np.testing.assert_array_equal, again, first)


def test_a_fresh_planner_has_no_requests():
    plan = js.HostPlanner(CONFIG, 4).plan()
    assert plan.reason.tolist() == [js.Reason.EMPTY_ROW] * 4
