"""Invariant: on random tables of any size each field of a plan equals the oracle's.

Mixed phases, beams, adapters, rows in flight or held, encoder inputs, unsorted points,
empty rows in between, token counts from 1 up to the largest that the constructors take
(sums then pass int32), limits that bind and limits that do not. The fast tests draw
700 tables of up to 16 rows a program, the slow ones 9,200 of up to 64 rows: 110,400.
Beside them come tables of short prefills alone that compete for a tight budget: 1,000
a chunking program, and 40,000 in the slow tests, 360,000 in all. The slow tests plan
all of them with both forms of walking the rows.
"""

import jax
import pytest

from generators import CONFIGS, crowded_cases, make_case, random_cases
from oracles import planner, records
from planner_harness import assert_same_plans, plan_one
from test_planner_exhaustive import name_of


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_random_tables(config):
    assert_same_plans(random_cases("fast", 700, config, max_rows=16, max_points=8))


@pytest.mark.parametrize(
    "config",
    [
        ("tensorrt_llm", "force_chunk", "cut", 8),
        ("jaxsched", "first_come_first_served", "cut", 8),
    ],
    ids=name_of,
)
def test_random_tables_of_a_decoder_only_model(config):
    assert_same_plans(
        random_cases(
            "decoder",
            700,
            config,
            max_rows=16,
            max_points=8,
            encoder_decoder=False,
            group_by_lora=config[0] == "tensorrt_llm",
        )
    )


WALKS = pytest.mark.parametrize("row_walk", ["parallel", "sequential"])


@pytest.mark.slow
@WALKS
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_many_random_tables(config, row_walk):
    cases = random_cases("slow", 9200, config, max_rows=64, max_points=8)
    assert_same_plans(cases, num_rows=64, compiler=jax.jit, row_walk=row_walk)


CHUNKED = [config for config in CONFIGS if config[1] != "none"]


@pytest.mark.parametrize("config", CHUNKED, ids=name_of)
def test_crowded_tables(config):
    assert_same_plans(crowded_cases("fast", 1000, config, max_rows=16))


@pytest.mark.slow
@WALKS
@pytest.mark.parametrize("config", CHUNKED, ids=name_of)
def test_many_crowded_tables(config, row_walk):
    cases = crowded_cases("slow", 40_000, config, max_rows=16)
    assert_same_plans(cases, row_walk=row_walk)


@pytest.mark.slow
@pytest.mark.parametrize("emitted", [1, 5])
@pytest.mark.parametrize("policy", ["force_chunk", "equal_progress"])
def test_other_numbers_of_emitted_points(policy, emitted):
    config = ("jaxsched", policy, "emit", emitted)
    assert_same_plans(random_cases("emit", 3000, config, max_rows=16, max_points=8))


def test_the_random_tables_reach_every_reason():
    """Guards the generator: a test over tables that never bind would prove nothing."""
    reasons, errors = set(), set()
    for config in CONFIGS:
        for case in random_cases("fast", 300, config, max_rows=16, max_points=8):
            answer = planner.plan(case)
            reasons.update(answer.reason)
            errors.add(answer.error)
    assert reasons == set(range(14))
    assert errors == {0, 1, 2}


def huge_rows():
    """Rows whose tokens together pass int32 several times over."""
    longest = records.MAX_COUNT
    prefills = [
        records.Row(phase="prefill", num_prompt_tokens=longest, num_draft_tokens=9)
        for _ in range(4)
    ]
    encodes = [
        records.Row(phase="encode", num_prompt_tokens=1, num_encoder_tokens=longest)
        for _ in range(4)
    ]
    decodes = [records.Row(phase="decode", num_prompt_tokens=1, beam_width=2)] * 4
    return decodes + encodes + prefills


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_total_past_int32_is_held_not_wrapped(config):
    case = make_case(
        config,
        huge_rows(),
        max_num_seqs=20,
        max_num_batched_tokens=records.UNLIMITED,
        max_context_length=records.UNLIMITED,
        chunk_unit_size=2**27,
    )
    answer = plan_one(case)
    assert answer.num_seqs == 12
    assert answer.num_batched_tokens == records.MAX_COUNT + 1
