"""Every bad value is refused where it enters, by record, field and value."""

import re

import numpy as np
import pytest

import jaxsched as js
from jaxsched.core.build import MAX_DRAFT_TOKENS, MAX_UNIT

GOOD = {"num_prompt_tokens": 10}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_prompt_tokens", 0, ">= 1, got 0"),
        ("num_prompt_tokens", -5, ">= 1, got -5"),
        ("num_prompt_tokens", 2**31, "<= 1073741822"),
        ("num_prompt_tokens", 3.0, "integer, got 3.0"),
        ("num_prompt_tokens", float("nan"), "integer, got nan"),
        ("num_prompt_tokens", True, "integer, got True"),
        ("num_prompt_tokens", "9", "integer, got '9'"),
        ("num_prompt_tokens", None, "integer, got None"),
        ("num_computed_tokens", 10, "below num_prompt_tokens=10"),
        ("num_output_tokens", js.MAX_COUNT, "together are above"),
        ("num_draft_tokens", MAX_DRAFT_TOKENS + 1, "<= 32768"),
        ("beam_width", 0, ">= 1"),
        ("max_new_tokens", 0, ">= 1"),
        ("phase", "queued", "one of encode, prefill"),
        ("phase", "empty", "one of encode, prefill"),
        ("lora_id", -2, ">= -1"),
        ("lora_id", 2**16, "<= 65534"),
        ("in_flight", 1, "true or false, got 1"),
        ("hold_reason", "because", "one of scheduled"),
        ("snapshot_interval", -1, ">= 0"),
        ("snapshot_points", [5, 3], "must ascend, got 3 after 5 at entry 1"),
        ("snapshot_points", [5, 5], "must ascend"),
        ("snapshot_points", [-1], r"snapshot_points[0] must be >= 0, got -1"),
        ("snapshot_points", 5, "list of integers, got 5"),
        ("requested_points", "55", "list of integers, got '55'"),
        ("num_prompts", 1, "unknown field 'num_prompts'"),
    ],
)
def test_a_bad_field_is_named(field, value, words):
    record = {**GOOD, field: value}
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        js.request_table([GOOD, record])
    assert "requests[1]" in str(caught.value)


def test_a_missing_length_is_named():
    with pytest.raises(ValueError, match=r"requests\[0\].num_prompt_tokens is missing"):
        js.request_table([{"phase": "decode"}])


def test_records_must_fit_the_sizes():
    with pytest.raises(ValueError, match="3 requests do not fit into num_rows=2"):
        js.request_table([GOOD] * 3, num_rows=2)
    with pytest.raises(ValueError, match=r"requests\[1\].snapshot_points has 2 points"):
        js.request_table([GOOD, {**GOOD, "snapshot_points": [1, 2]}], num_points=1)
    with pytest.raises(ValueError, match=r"requests\[0\] must be a mapping"):
        js.request_table([[1, 2]])


def test_rows_are_padded_to_a_bucket():
    table = js.request_table([GOOD] * 5)
    assert table.num_rows == 8
    assert table.phase.tolist() == [js.Phase.PREFILL] * 5 + [js.Phase.EMPTY] * 3
    assert js.request_table([]).num_rows == 1


def test_every_field_lands_in_its_own_array():
    """Distinct values, so that two swapped fields show."""
    values = {
        "request_id": 3,
        "phase": "decode",
        "num_prompt_tokens": 101,
        "num_computed_tokens": 102,
        "num_cached_tokens": 103,
        "num_reusable_tokens": 104,
        "num_output_tokens": 105,
        "max_new_tokens": 106,
        "num_draft_tokens": 107,
        "num_encoder_tokens": 108,
        "beam_width": 109,
        "lora_id": 110,
        "priority": -111,
        "arrival": 112,
        "in_flight": True,
        "hold_reason": "held",
        "snapshot_interval": 113,
        "requested_points": [114, 115],
        "snapshot_points": [116],
    }
    table = js.request_table([values])
    for field, value in values.items():
        array = np.asarray(getattr(table, field))[0]
        if field == "phase":
            value = js.Phase.DECODE
        if field == "hold_reason":
            value = js.Reason.HELD
        np.testing.assert_array_equal(array, value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_num_batched_tokens", 0, "max_num_batched_tokens must be >= 1, got 0"),
        ("max_num_batched_tokens", 2**30, "<= 1073741822"),
        ("max_num_seqs", 0, "max_num_seqs must be >= 1"),
        ("chunk_unit_size", 0, "chunk_unit_size must be >= 1"),
        ("chunk_unit_size", MAX_UNIT + 1, "chunk_unit_size must be <="),
        ("chunk_unit_size", 4096, "set max_num_batched_tokens to at least 4096"),
        ("max_context_length", 32, "set max_context_length to at least 64"),
        ("max_context_length", 6.5, "max_context_length must be an integer"),
    ],
)
def test_a_bad_budget_is_named(field, value, words):
    with pytest.raises(ValueError, match=words):
        js.budget(**{"max_num_batched_tokens": 2048, field: value})


def test_unlimited_is_none():
    limits = js.budget(max_num_batched_tokens=None)
    assert int(limits.max_num_batched_tokens) == js.UNLIMITED
    assert int(limits.max_context_length) == js.UNLIMITED


def test_a_unit_above_the_budget_is_accepted_on_request():
    limits = js.budget(max_num_batched_tokens=24, chunk_unit_size=32, strict=False)
    assert int(limits.chunk_unit_size) == 32
