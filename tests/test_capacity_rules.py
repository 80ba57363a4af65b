"""Invariant: each deviation of the `jaxsched` rules from the published ones is real.

Every test gives one table to both rule sets: the published answer is the defect, the
other answer is what was asked for.
"""

from jaxsched.scheduling.capacity_cases import answer_capacity_cases

KEYS = ("admitted", "disagg_decode_init", "preempted")


def both(policy, requests, windows, **pools):
    """The answers of the published rules and of ours to one table."""
    pools = {
        "policy": policy,
        "max_num_requests": 16,
        "block_size": 10,
        "windows": [{"window": None, "free_blocks": free} for free in windows],
        **pools,
    }
    requests = [{"id": at, **request} for at, request in enumerate(requests)]
    case = {"capacity": pools, "requests": requests}
    return answer_capacity_cases(
        [{**case, "rules": rules} for rules in ("tensorrt_llm", "jaxsched")]
    )


def prefill(prompt, new=10, **fields):
    return {"num_prompt_tokens": prompt, "max_new_tokens": new, **fields}


def decode(prompt, output, held, new=40, **fields):
    return prefill(
        prompt,
        new,
        phase="decode",
        num_output_tokens=output,
        allocated_blocks=[held],
        **fields,
    )


def reason_of(answer, name):
    return next(e["reason"] for e in answer["reasons"] if e["id"] == name)


def test_a_retried_prefill_does_not_defer_to_itself():
    """3 blocks free, 5 needed; the victim holds 5 (one of lower priority for us)."""
    requests = [
        prefill(50, new_block_key=1, priority=1),
        decode(45, 5, held=5),
    ]
    theirs, ours = both("max_utilization", requests, [3], prefix_deferral=True)
    assert [theirs[key] for key in KEYS] == [[], [], [1]]
    assert reason_of(theirs, 0) == "prefix_deferred"
    assert [ours[key] for key in KEYS] == [[0], [], [1]]


def test_too_many_requests_preempt_nobody():
    requests = [decode(10, 5, held=2), decode(10, 5, held=2)]
    theirs, ours = both("max_utilization", requests, [9], max_num_requests=1)
    assert [theirs[key] for key in KEYS] == [[0], [], [1]]
    assert [ours[key] for key in KEYS] == [[0], [], []]
    assert reason_of(ours, 1) == "batch_full"


def test_a_missing_adapter_preempts_nobody():
    requests = [
        decode(10, 5, held=2, lora_id=0, lora_pages=8),
        decode(10, 5, held=2, lora_id=1, lora_pages=8),
        decode(10, 5, held=2),
    ]
    theirs, ours = both("max_utilization", requests, [9], lora_pages=10)
    assert theirs["preempted"] == [2, 1]
    assert ours["preempted"] == [] and ours["admitted"] == [0, 2]
    assert reason_of(ours, 1) == "no_lora_pages"


def test_nobody_is_preempted_where_that_does_not_help():
    """The head needs 9 blocks; 6 are free or held behind it, 3 by a row in flight."""
    requests = [
        prefill(90, priority=1),
        decode(10, 5, held=2),
        decode(10, 5, held=3, in_flight=True),
    ]
    theirs, ours = both("max_utilization", requests, [4])
    assert theirs["preempted"] == [2, 1] and theirs["admitted"] == [0]
    assert ours["preempted"] == [] and ours["admitted"] == [1, 2]
    assert reason_of(ours, 0) == "no_blocks"


def test_a_row_that_gets_nothing_keeps_what_it_holds():
    """Nobody needs the blocks of the last row: it waits instead of starting again."""
    requests = [decode(11, 1, held=2), decode(10, 10, held=2)]
    theirs, ours = both("max_utilization", requests, [0])
    assert [theirs[key] for key in KEYS] == [[0], [], [1]]
    assert [ours[key] for key in KEYS] == [[0], [], []]
    assert reason_of(ours, 1) == "no_blocks"


def test_a_waiting_prompt_preempts_no_equal():
    requests = [prefill(50), decode(45, 4, held=5)]
    theirs, ours = both("max_utilization", requests, [3])
    assert [theirs[key] for key in KEYS] == [[0], [], [1]]
    assert [ours[key] for key in KEYS] == [[1], [], []]


def test_a_prompt_that_can_never_fit_is_refused_with_the_number():
    requests = [prefill(200), prefill(20)]
    for policy, needed in (("guaranteed_no_evict", 21), ("max_utilization", 20)):
        theirs, ours = both(policy, requests, [10])
        assert theirs["admitted"] == []  # the first blocks the queue for ever
        assert ours["admitted"] == [1]
        assert reason_of(ours, 0) == "too_large"
        (refusal,) = ours["refused"]
        assert refusal["id"] == 0
        assert "has 10" in refusal["why"]
        assert f"set total_blocks to at least {needed}" in refusal["why"]


def test_an_adapter_that_can_never_fit_is_refused_with_the_number():
    requests = [prefill(10, lora_id=7, lora_pages=30), prefill(10)]
    theirs, ours = both("max_utilization", requests, [10], lora_pages=20)
    assert theirs["admitted"] == []
    assert ours["admitted"] == [1]
    assert "set lora_pages to at least 30" in ours["refused"][0]["why"]


def test_a_request_that_outgrows_the_whole_pool_is_refused():
    """Alone in the pool and out of blocks: published, it preempts itself for ever."""
    theirs, ours = both("max_utilization", [decode(90, 10, held=10)], [0])
    assert theirs["preempted"] == [0]
    assert ours["preempted"] == [] and reason_of(ours, 0) == "too_large"
    assert "set total_blocks to at least 11" in ours["refused"][0]["why"]


def test_a_transfer_is_taken_by_count_too():
    requests = [prefill(10, phase="disagg_decode_init")]
    theirs, ours = both("max_requests", requests, [10])
    assert theirs["disagg_decode_init"] == []
    assert ours["disagg_decode_init"] == [0]


def test_a_transfer_does_not_take_the_blocks_of_a_prompt_under_way():
    requests = [
        prefill(50, num_computed_tokens=20, allocated_blocks=[5]),
        prefill(40, phase="disagg_decode_init"),
    ]
    theirs, ours = both("guaranteed_no_evict", requests, [5])
    assert theirs["admitted"] == [] and theirs["disagg_decode_init"] == [1]
    assert ours["admitted"] == [0] and ours["disagg_decode_init"] == []


def test_a_failed_first_chunk_registers_nothing():
    """Two equal prompts, the first without its adapter: the second need not wait."""
    requests = [
        prefill(10, new_block_key=3, lora_id=0, lora_pages=9),
        prefill(10, new_block_key=3),
    ]
    pools = {"lora_pages": 5, "prefix_deferral": True}
    theirs, ours = both("max_utilization", requests, [9], **pools)
    assert theirs["admitted"] == []
    assert ours["admitted"] == [1]


def test_priority_decides_who_is_preempted():
    requests = [
        decode(10, 10, held=2, priority=0),
        decode(10, 10, held=2, priority=2),
        decode(10, 10, held=2, priority=1),
    ]
    theirs, ours = both("max_utilization", requests, [0])
    assert theirs["preempted"] == [2] and theirs["admitted"] == [0, 1]
    assert ours["preempted"] == [0] and ours["admitted"] == [1, 2]


def test_an_urgent_prompt_preempts_and_its_place_in_the_queue_does_not_matter():
    requests = [decode(10, 5, held=2), prefill(30, priority=5)]
    theirs, ours = both("max_utilization", requests, [1])
    assert theirs["admitted"] == [0] and theirs["preempted"] == []
    assert ours["admitted"] == [1] and ours["preempted"] == [0]


def test_live_states_are_counted():
    """A recurrent state is a resource like a block, under every policy."""
    requests = [
        decode(10, 5, held=2, allocated_state_slots=1),
        prefill(10, new_state_slots=1),
        prefill(10, new_state_slots=1),
    ]
    for policy in ("guaranteed_no_evict", "max_utilization"):
        theirs, ours = both(policy, requests, [90], free_state_slots=1)
        assert theirs["admitted"] == ours["admitted"] == [0, 1]
    refused = both(
        "max_utilization", [prefill(10, new_state_slots=3)], [9], free_state_slots=2
    )[1]
    assert "set total_state_slots to at least 3" in refused["refused"][0]["why"]
