"""Invariant: whole runs under each policy take the published number of iterations.

Figures from TensorRT-LLM's own scheduler tests (blocks of 10 tokens, no reuse). The
oracle drives the runs; every pass of them is then answered by the arrays as well. Under
the `jaxsched` rules every run ends, and no pass leaves everybody out.
"""

import random

import pytest

from jaxsched.scheduling.capacity_cases import answer_capacity_cases
from oracles import capacity, capacity_records
from oracles.capacity_run import request, run

MAX, NO_EVICT, STATIC = "max_utilization", "guaranteed_no_evict", "static_batch"
FITTING = ("max_requests", NO_EVICT, STATIC, MAX)


class Recorder:
    """Answers by the oracle and keeps what was asked."""

    def __init__(self):
        self.cases, self.answers = [], []

    def __call__(self, case):
        read = capacity_records.read_case(case)
        answer = capacity_records.golden_form(read, capacity.admit(read))
        self.cases.append(case)
        self.answers.append(answer)
        return answer


def pools(policy, blocks, count=100, rules="tensorrt_llm", **more):
    window = {"window": 1_000_000, "free_blocks": blocks}
    return {
        "rules": rules,
        "policy": policy,
        "max_num_requests": count,
        "block_size": 10,
        "windows": [window],
        **more,
    }


def pair(prompt, new, **fields):
    return [request(name, prompt, new, **fields) for name in (0, 1)]


def adapters(pages):
    return [
        request(name, 10, 50, lora_id=name % 2, lora_pages=pages) for name in range(3)
    ]


def published_runs():
    """Name, pools, requests, other arguments, iterations, `(first, last, ids)`."""
    transfers = pair(10, 80, phase="disagg_decode_init")
    with_drafts = pair(10, 80)
    with_drafts[0].num_draft_tokens, with_drafts[1].num_draft_tokens = 5, 10
    late = {"arrivals": {0: 2, 10: 4}}
    four = [request(name, 10, 80) for name in range(4)]
    three = [request(name, 10, new) for name, new in enumerate((80, 40, 80))]
    taking_turns = [(0, 40, [0, 1]), (41, 79, [0]), (80, 118, [1])]
    waves = [(0, 9, [0, 1]), (10, 20, [0, 1, 2, 3]), (21, 40, [0, 1]), (41, 79, [0])]
    waves += [(80, 89, [1, 2]), (90, 118, [1]), (119, 138, [2, 3])]
    waves += [(139, 177, [2]), (178, 226, [3])]
    chunked = [(0, 21, [0, 1]), (22, 60, [0]), (61, 99, [1])]
    return [
        ("turns", pools(MAX, 10), pair(10, 80), {}, 119, taking_turns),
        ("in order", pools(NO_EVICT, 10), pair(10, 80), {}, 160, None),
        ("transfers", pools(MAX, 10), transfers, {}, 119, taking_turns),
        ("chunks fit", pools(MAX, 20), pair(50, 40), {"chunk": 20}, 42, None),
        ("chunks wait", pools(NO_EVICT, 10), pair(30, 60), {"chunk": 20}, 122, None),
        ("chunks", pools(MAX, 10), pair(30, 60), {"chunk": 20}, 100, chunked),
        ("long chunks", pools(MAX, 10), pair(70, 20), {"chunk": 40}, 42, None),
        ("drafts", pools(MAX, 10), with_drafts, {}, 129, None),
        ("waves", pools(MAX, 10), four, late, 227, waves),
        ("batches", pools(STATIC, 20, 2), three, {}, 160, None),
        *(
            (f"{policy} small adapters", pools(policy, 21, lora_pages=30), adapters(15))
            + ({}, 50, None)
            for policy in (NO_EVICT, STATIC, MAX)
        ),
        *(
            (f"{policy} large adapters", pools(policy, 21, lora_pages=30), adapters(20))
            + ({}, 100, [(0, 49, [0, 2]), (50, 99, [1])])
            for policy in (NO_EVICT, STATIC)
        ),
        ("one adapter a time", pools(MAX, 21, lora_pages=30), adapters(20), {}, 150)
        + ([(0, 49, [0]), (50, 99, [1]), (100, 149, [2])],),
        *(
            (f"{policy} fits", pools(policy, 20), pair(10, 80), {}, 80, None)
            for policy in FITTING
        ),
    ]


def test_published_runs():
    recorder = Recorder()
    for name, limits, requests, more, iterations, spans in published_runs():
        found = run(recorder, limits, requests, **more)
        assert found.num_iterations == iterations, name
        if spans is not None:
            assert found.spans() == spans, name
    answers = answer_capacity_cases(recorder.cases)
    for case, answer, expected in zip(
        recorder.cases, answers, recorder.answers, strict=True
    ):
        assert {key: answer[key] for key in expected} == expected, case


def test_a_preempted_request_starts_again_with_its_answer_as_prompt():
    found = run(Recorder(), pools(MAX, 10), pair(10, 80))
    assert found.starts == {(0, 10): 0, (1, 10): 0, (1, 51): 80}


@pytest.mark.parametrize("policy", FITTING[1:])
def test_every_run_ends_and_nobody_is_left_out_for_nothing(policy):
    """Random runs that fit into the pool one by one: each pass admits somebody."""
    rng, recorder = random.Random(5), Recorder()
    for _ in range(25):
        requests = [
            request(
                name,
                rng.randrange(1, 60),
                rng.randrange(1, 30),
                priority=rng.randrange(0, 3),
                num_draft_tokens=rng.randrange(0, 3),
            )
            for name in range(rng.randrange(1, 7))
        ]
        limits = pools(policy, rng.randrange(10, 14), rng.randrange(1, 4), "jaxsched")
        found = run(recorder, limits, requests, chunk=rng.choice((None, 20)))
        assert all(found.ran)
