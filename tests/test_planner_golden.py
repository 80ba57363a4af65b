"""Invariant: the `tensorrt_llm` rules answer as the published scheduler does.

`data/` holds 200 planning cases and 60 publication cases, chosen so that every policy,
phase, error, kind of draft trimming and kind of limit occurs; the shared files hold
5,000 and 500. The oracles are held against the same answers.
"""

import gzip
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxsched
from oracles import planner, records
from oracles.planner_points import published_points
from planner_harness import BATCH, POINTS, ROWS, config_of, run_cases
from shared_data import shared_path

DATA = Path(__file__).parent / "data"


def read_lines(path):
    """The JSON objects of a file, gzipped or not."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with opened as lines:
        return [json.loads(line) for line in lines]


def answer_all(lines, num_rows, num_points, batch):
    """The implementation's answers in the files' form, in the files' order."""
    groups = {}
    for at, line in enumerate(lines):
        case = records.read_case(line["input"])
        if all(row.phase != "encode" for row in case.rows):
            # Plans the same either way: half as many programs.
            case.encoder_decoder = True
        groups.setdefault(config_of(case), []).append((at, case))
    answers = {}
    for members in groups.values():
        cases = [case for _, case in members]
        plans = run_cases(cases, num_rows, num_points, batch)
        for index, (at, case) in enumerate(members):
            plan = jax.tree.map(lambda array, i=index: array[i].tolist(), plans)
            answers[at] = records.golden_form(case, plan)
    return [answers[at] for at in range(len(lines))]


def misses(lines, answers):
    """Numbers of the cases that are answered otherwise than published."""
    return [
        line["case"]
        for line, answer in zip(lines, answers, strict=True)
        if answer != line["expected"]
    ]


def test_the_chosen_cases():
    lines = read_lines(DATA / "plan_cases.jsonl")
    assert len(lines) == 200
    assert misses(lines, answer_all(lines, ROWS, POINTS, BATCH)) == []


def test_the_oracle_answers_the_chosen_cases():
    lines = read_lines(DATA / "plan_cases.jsonl")
    assert misses(lines, [planner.expected(line["input"]) for line in lines]) == []


@pytest.mark.slow
def test_all_shared_cases():
    lines = read_lines(shared_path("golden/plan.jsonl.gz"))
    assert misses(lines, answer_all(lines, 256, 40, 64)) == []


def test_the_oracle_answers_all_shared_cases():
    lines = read_lines(shared_path("golden/plan.jsonl.gz"))
    assert misses(lines, [planner.expected(line["input"]) for line in lines]) == []


def listed_points(case):
    """The implementation's publication for a case of the files."""
    names = {
        "snapshot_interval": "interval",
        "offsets_from_start": "from_start",
        "offsets_from_end": "from_end",
    }
    return jaxsched.list_snapshot_points(
        **{names.get(key, key): value for key, value in case.items()}
    )


def check_points(lines):
    assert misses(lines, [published_points(**line["input"]) for line in lines]) == []
    assert misses(lines, [listed_points(line["input"]) for line in lines]) == []


def test_the_chosen_points():
    lines = read_lines(DATA / "points_cases.jsonl")
    assert len(lines) == 60
    check_points(lines)


def test_all_shared_points():
    check_points(read_lines(shared_path("golden/points.jsonl.gz")))


def test_publish_writes_what_the_files_list():
    """`publish` on arrays agrees with the lists, and so does walking its points."""
    publish = jax.jit(jaxsched.publish)
    following = jax.jit(jaxsched.next_snapshot_point)
    for line in read_lines(DATA / "points_cases.jsonl"):
        case = dict(line["input"])
        prompt = case["num_prompt_tokens"]
        # Offsets that lie outside fill up to one shape, hence one compilation.
        starts, ends = [case.get(f"offsets_from_{s}", []) for s in ("start", "end")]
        rules = jaxsched.snapshot_rules(
            interval=max(case.get("snapshot_interval") or 0, 0),
            from_start=[*starts, *[records.MAX_COUNT] * (5 - len(starts))],
            from_end=[*ends, *[records.MAX_COUNT] * (5 - len(ends))],
            enable_prefix_caching=case["enable_prefix_caching"],
        )
        stale = {"num_prompt_tokens": prompt, "snapshot_points": [prompt]}
        table = publish(jaxsched.request_table([stale], num_points=12), rules)
        stops = set(table.snapshot_points[0].tolist()) - {records.NO_ID}
        step = int(table.snapshot_interval[0])
        stops |= set(range(step, prompt + 1, step)) if step else set()
        assert sorted(stops) == line["expected"]
        position, found = jnp.int32(0), []
        while (position := following(table, position[None])[0]) < records.UNLIMITED:
            found.append(int(position))
            if len(found) == 40:
                break
        assert found == line["expected"][:40]


def test_the_numbers_of_the_oracle_are_those_of_the_package():
    """The oracles repeat the enumerations instead of importing them."""
    assert [name.upper() for name in records.PHASES] == [p.name for p in jaxsched.Phase]
    for kind in (jaxsched.Reason, jaxsched.PlanError):
        for member in kind:
            name = "NO_ERROR" if member.name == "NONE" else member.name
            assert getattr(records, name) == member
    for name in ("NO_ID", "UNLIMITED", "MAX_COUNT"):
        assert getattr(records, name) == getattr(jaxsched, name)


def test_a_wrong_plan_is_noticed():
    """Guards the comparison itself: a changed answer is reported."""
    lines = read_lines(DATA / "plan_cases.jsonl")[:20]
    answers = [planner.expected(line["input"]) for line in lines]
    at = next(i for i, answer in enumerate(answers) if answer.get("prefill"))
    answers[at]["prefill"][0]["num_scheduled_tokens"] += 1
    assert misses(lines, answers) == [lines[at]["case"]]
