"""Invariant: a pass on arrays decides what a walk over plain records decides.

Random cases under both rule sets, every policy and every feature: masks, both output
orders and the reason of every row are compared, and all stored published answers.
"""

import gzip
import json
import random

import pytest

from capacity_generator import random_case
from jaxsched.scheduling.capacity_cases import answer_capacity_cases
from oracles import capacity, capacity_records
from shared_data import shared_path

RULES = ("tensorrt_llm", "jaxsched")


def expect(case):
    """The oracle's answer in the form of the `plan` command."""
    read = capacity_records.read_case(case)
    answer = capacity.admit(read)
    form = capacity_records.golden_form(read, answer)
    if "error" not in form:
        form["reasons"] = capacity_records.reasons(read, answer)
    return form


def assert_same(cases):
    answers = answer_capacity_cases(cases)
    for case, answer in zip(cases, answers, strict=True):
        expected = expect(case)
        if "error" in expected:
            assert "error" in answer, json.dumps(case)
            continue
        found = {key: answer.get(key) for key in expected}
        assert found == expected, json.dumps(case)


def make_cases(seed, count, rich=True):
    rng = random.Random(seed)
    return [random_case(rng, RULES[at % 2], rich) for at in range(count)]


def test_arrays_decide_as_the_oracle_does():
    assert_same(make_cases(1, 3_000))


def test_the_cases_are_hard():
    """A generator that never preempts, defers or refuses would prove nothing."""
    seen = {}
    for case in make_cases(2, 3_000):
        answer = expect(case)
        for reason in answer.get("reasons", [{"reason": "error"}]):
            name = (case["rules"], reason["reason"])
            seen[name] = seen.get(name, 0) + 1
    for rules in RULES:
        names = ("wrong_phase", "held", "batch_full", "no_blocks", "no_lora_pages")
        names += ("behind_blocked", "prefix_deferred", "static_batch", "preempted")
        for name in names:
            assert seen[rules, name] >= 20, (rules, name)
    assert seen["tensorrt_llm", "error"] >= 20
    assert seen["jaxsched", "too_large"] >= 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 16))
def test_arrays_decide_as_the_oracle_does_at_length(seed):
    assert_same(make_cases(seed, 10_000, rich=seed % 3 != 0))


def stored_answers():
    path = shared_path("golden/capacity.jsonl.gz")
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def test_stored_published_answers():
    stored = stored_answers()
    answers = answer_capacity_cases([line["input"] for line in stored])
    for line, answer in zip(stored, answers, strict=True):
        found = {key: answer.get(key) for key in line["expected"]}
        assert found == line["expected"], line["case"]


def test_the_oracle_gives_the_stored_published_answers():
    for line in stored_answers():
        answer = expect(line["input"])
        found = {key: answer[key] for key in line["expected"]}
        assert found == line["expected"], line["case"]


def test_stored_tables_under_the_other_rules():
    """The same tables as hard input for the `jaxsched` rules."""
    assert_same([{**line["input"], "rules": "jaxsched"} for line in stored_answers()])
