"""The static configuration checks itself, is hashable, and takes plain names."""

import pytest

import jaxsched as js


def test_plain_names_are_taken_and_equal_configurations_are_one_key():
    named = js.SchedulerConfig(chunking_policy="equal_progress", rules="tensorrt_llm")
    assert named.chunking_policy is js.ChunkingPolicy.EQUAL_PROGRESS
    typed = js.SchedulerConfig(
        chunking_policy=js.ChunkingPolicy.EQUAL_PROGRESS, rules=js.Rules.TENSORRT_LLM
    )
    assert named == typed and hash(named) == hash(typed)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"rules": "vllm"}, "rules must be one of 'jaxsched', 'tensorrt_llm'"),
        ({"chunking_policy": "fcfs"}, "chunking_policy must be one of"),
        ({"snapshot_mode": None}, "snapshot_mode must be one of 'cut', 'emit'"),
        ({"max_emit_points": 0}, "max_emit_points must be an integer >= 1, got 0"),
        ({"rules": "tensorrt_llm", "snapshot_mode": "emit"}, "needs rules='jaxsched'"),
        ({"rules": "tensorrt_llm", "group_by_lora": False}, "needs rules='jaxsched'"),
    ],
)
def test_a_bad_choice_is_refused_by_name(choice, words):
    with pytest.raises(ValueError, match=words):
        js.SchedulerConfig(**choice)


def test_every_plan_error_says_what_to_change():
    for error in js.PlanError:
        assert bool(error.message) == (error != js.PlanError.NONE)
