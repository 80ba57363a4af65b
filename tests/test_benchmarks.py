"""The NumPy baseline plans what the oracle plans: the comparison is an honest one."""

import sys

import numpy as np
import pytest

from shared_data import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks import numpy_planner, planning
from generators import random_cases
from jaxsched.core.config import Phase
from oracles import planner
from planner_harness import stack_tables

FIELDS = (
    "num_scheduled_tokens",
    "num_draft_tokens",
    "is_last_chunk",
    "snapshot_point",
    "prefill_mask",
    "decode_mask",
    "order",
    "reason",
    "num_seqs",
    "num_batched_tokens",
)


@pytest.mark.parametrize("policy", planning.POLICIES)
def test_numpy_equals_the_oracle(policy):
    config = ("jaxsched", policy, "cut", 8)
    cases = random_cases(3, 400, config, 16, 8, encoder_decoder=False)
    for case in cases:
        table = stack_tables([case], num_rows=len(case.rows))
        requests = {
            name: np.asarray(getattr(table, name))[0]
            for name in table.__dataclass_fields__
        }
        if np.any(requests["phase"] == Phase.ENCODE):
            continue
        limits = {
            name: getattr(case, name)
            for name in ("max_num_batched_tokens", "max_num_seqs")
            + ("chunk_unit_size", "max_context_length")
        }
        found = numpy_planner.plan(requests, limits, policy, case.group_by_lora)
        right = planner.plan(case)
        for field in FIELDS:
            np.testing.assert_array_equal(
                found[field], getattr(right, field), err_msg=f"{field} of {case}"
            )


def test_the_three_forms_agree_on_what_is_timed():
    figures = planning.compare("force_chunk", 64, "tight")
    assert set(figures) == {"python", "numpy", "jit"}
    assert all(times["min_us"] > 0 for times in figures.values())
