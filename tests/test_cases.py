"""Case dictionaries: batches answer what single cases answer, bad ones are named."""

import json

import pytest

from jaxsched.scheduling import cases
from jaxsched.scheduling.case_reading import CaseError
from shared_data import ROOT

CASE = {
    "chunking_policy": "force_chunk",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 100,
    "chunk_unit_size": 32,
    "requests": [{"id": "a", "num_prompt_tokens": 300, "snapshot_interval": 64}],
}


def test_a_batch_answers_like_its_cases_alone():
    lines = (ROOT / "tests" / "data" / "plan_cases.jsonl").read_text().splitlines()
    inputs = [json.loads(line)["input"] for line in lines]
    inputs = [case for case in inputs if case["chunking_policy"] == "equal_progress"][
        :3
    ]
    together = cases.answer_plan_cases(inputs)
    assert together == [cases.answer_plan_cases([case])[0] for case in inputs]


def test_the_answer_says_why_and_where():
    emit = {
        **CASE,
        "snapshot_mode": "emit",
        "max_num_batched_tokens": 300,
        "requests": [
            *CASE["requests"],
            {"id": "b", "num_prompt_tokens": 40, "phase": "finished"},
            {"id": "c", "num_prompt_tokens": 40},
        ],
    }
    cut, emitted = cases.answer_plan_cases([CASE, emit])
    assert cut["prefill"] == [
        {"id": "a", "num_scheduled_tokens": 64, "num_draft_tokens": 0}
    ]
    assert cut["snapshots"] == [{"id": "a", "position": 64}]
    assert emitted["emit"] == [{"id": "a", "positions": [64, 128, 192, 256]}]
    assert emitted["snapshots"] == []
    assert emitted["reasons"] == [
        {"id": "b", "reason": "wrong_phase"},
        {"id": "c", "reason": "no_budget"},
    ]
    assert emitted["num_batched_tokens"] == 300


def test_adapter_ids_of_any_size_group_in_their_order():
    adapters = [2**40, None, 7, 2**40, 8]
    requests = [
        {"id": at, "num_prompt_tokens": 8, "lora_id": adapter}
        for at, adapter in enumerate(adapters)
    ]
    answer = cases.answer_plan_cases([{**CASE, "requests": requests}])[0]
    assert [entry["id"] for entry in answer["prefill"]] == [1, 2, 4, 0, 3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"requests": None}, "requests must be a list, got None"),
        ({"requests": [3]}, r"requests\[0\] must be a JSON object, got 3"),
        ({"requests": [{"num_prompt_tokens": 3}]}, r"requests\[0\].id is missing"),
        ({"requests": [{"id": 1.5, "num_prompt_tokens": 3}]}, "integer or a string"),
        ({"requests": [{"id": 1, "num_prompt_tokens": 3}] * 2}, "id repeats 1"),
        ({"requests": [{"id": 1, "prompt": 3}]}, "unknown field 'prompt'"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be >= 1"),
        ({"max_num_batched_tokens": "9"}, "max_num_batched_tokens must be an integer"),
        ({"max_context_length": -1}, "max_context_length must be >= 1"),
        ({"chunk_unit_size": 0}, "chunk_unit_size must be >= 1"),
        ({"chunk_unit_size": None}, "chunk_unit_size must be an integer"),
        ({"chunking_policy": "best"}, "chunking_policy must be one of"),
        ({"encoder_decoder": 1}, "encoder_decoder must be true or false"),
        ({"budget": 4}, "unknown key 'budget'"),
    ],
)
def test_a_bad_case_is_named_and_nothing_is_answered(change, words):
    with pytest.raises(CaseError, match=words) as caught:
        cases.answer_plan_cases([CASE, {**CASE, **change}])
    assert caught.value.index == 1


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({}, "num_prompt_tokens is missing"),
        ({"num_prompt_tokens": -1}, ">= 0, got -1"),
        ({"num_prompt_tokens": 5, "snapshot_interval": 0.5}, "snapshot_interval must"),
        ({"num_prompt_tokens": 5, "offsets_from_end": [-1]}, r"from_end\[0\]"),
        ({"num_prompt_tokens": 5, "enable_prefix_caching": "yes"}, "true or false"),
        ({"num_prompt_tokens": 5, "interval": 3}, "unknown key 'interval'"),
    ],
)
def test_a_bad_points_case_is_named(case, words):
    with pytest.raises(CaseError, match=words):
        cases.answer_points_cases([case])
