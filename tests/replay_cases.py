"""Random workloads that share prefixes, as lines and as the oracle's jobs."""

import dataclasses
import json

from jaxsched.simulation.metrics import metrics, request_report
from jaxsched.simulation.replay import replay
from jaxsched.simulation.replay_clock import NEVER_PS
from jaxsched.simulation.replay_config import ReplayConfig
from jaxsched.simulation.workloads_reading import read_workload
from oracles import replay as oracle
from oracles.replay_cache import CacheBook, Prefixes

_PS_PER_MS = 10**9
LENGTHS = (1, 5, 15, 16, 17, 32, 40, 64, 100)
OUTPUTS = (1, 2, 3, 16, 33, 60)
LONGEST = 500
"""Tokens of prompt and answer together; the width of the tables."""

COSTS = {"step_ms": 1.0, "token_us": 10.0, "context_ns": 30.0}
_PS = {"step_ms": "base_ps", "token_us": "token_ps", "context_ns": "context_ps"}


def draw_lines(draw, count, with_holes=False):
    """Chats, forks and repeated prompts, some at once, some long after."""
    lines, at = [], 0
    for index in range(count):
        at += draw.choice((0, 0, 1, 20, 300)) if lines else 0
        line = {"id": f"r{index}", "timestamp": at}
        line["output_length"] = draw.choice(OUTPUTS)
        line["segments"] = _draw_prompt(draw, lines)
        room = LONGEST - _length(line["segments"])
        line["output_length"] = min(line["output_length"], room)
        if draw.random() < 0.2:
            points = {draw.randint(1, 300) for _ in range(draw.randint(1, 3))}
            line["snapshot_points"] = sorted(points)
        if draw.random() < 0.1:
            line["lora_id"] = 3
        if with_holes:
            line["priority"] = draw.choice((0, 0, 0, 2))
            if draw.random() < 0.2:
                line["cancel_at"] = at + draw.choice((0, 5, 40, 200))
        lines.append(line)
    # One of the greatest length in each: so all runs have tables of the same width.
    last = {"id": "long", "timestamp": at, "output_length": 2}
    return [*lines, {**last, "segments": [["long", LONGEST - 2]]}]


def _length(segments):
    return sum(length for _, length in segments)


def _draw_prompt(draw, lines):
    kind = draw.random()
    own = [f"own{len(lines)}", draw.choice(LENGTHS)]
    if lines and kind < 0.6:
        parent = draw.choice(lines[-6:])
        prompt = list(parent["segments"])
        if kind < 0.4:
            kept = draw.choice((1, 1, 0.5))
            whole = max(1, int(parent["output_length"] * kept))
            prompt = [*prompt, [f"answer:{parent['id']}", whole]]
        if kind < 0.5:
            prompt.append(own)
        if _length(prompt) < LONGEST - 20:
            return prompt
    shared = [draw.choice(("system", "other")), draw.choice(LENGTHS)]
    return [shared, own] if draw.random() < 0.8 else [own]


def jobs_of(lines):
    """The oracle's jobs: each prefix of prompt and answer has a name."""
    prefixes, jobs = Prefixes(), []
    for line in lines:
        tokens = []
        for name, length in line["segments"]:
            tokens += [(name, place) for place in range(length)]
        answer = [(f"answer:{line['id']}", i) for i in range(line["output_length"])]
        lora = line.get("lora_id", -1)
        arrival, until = line["timestamp"], line.get("cancel_at")
        jobs.append(
            oracle.Job(
                prompt=len(tokens),
                output=line["output_length"],
                arrival=arrival * _PS_PER_MS,
                patience=None if until is None else (until - arrival) * _PS_PER_MS,
                priority=line.get("priority", 0),
                lora_id=lora,
                points=tuple(line.get("snapshot_points", ())),
                path=prefixes.path(tokens + answer, lora),
            )
        )
    return jobs


def settings(**chosen):
    """The configuration of a replay and the oracle's options for it."""
    config = ReplayConfig(**COSTS, **chosen)
    names = {field.name for field in dataclasses.fields(oracle.Options)}
    options = {name: value for name, value in chosen.items() if name in names}
    options |= {name: getattr(config, name) for name in _PS.values()}
    return config, oracle.Options(**options)


def compare(lines, path, **chosen):
    """Runs both and compares every request; what the oracle's cache came to."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config, options = settings(**chosen)
    run = replay(read_workload(str(path)), config)
    jobs, book = jobs_of(lines), CacheBook(options)
    oracle.run(jobs, options, book)
    for got, line, job in zip(request_report(run), lines, jobs, strict=True):
        _check_report(got, job, line)
    for index, job in enumerate(jobs):
        times = (job.admitted, job.first_token, job.finish)
        want = tuple(NEVER_PS if time is None else time for time in times)
        got = (run.admitted[index], run.first_token[index], run.finish[index])
        assert tuple(int(time) for time in got) == want, lines[index]
    found = metrics(run)
    assert found["num_evicted_blocks"] == book.num_evicted_blocks
    assert found["num_evicted_snapshots"] == book.num_evicted_snapshots
    assert found["num_snapshots_filed"] == book.num_filed
    again = sum(job.report.get("recomputed", 0) for job in jobs)
    assert found["num_recomputed_tokens"] == again
    cached = sum(job.report.get("num_cached_tokens", 0) for job in jobs)
    assert found["num_cached_tokens"] == cached
    lost = sum(job.report.get("seen", 0) for job in jobs) - cached
    assert sum(found["lost_tokens"].values()) == lost
    return jobs, book


def _check_report(got, job, line):
    numbers = ("num_cached_tokens", "num_kv_matched_tokens")
    numbers += ("num_state_matched_tokens", "num_preemptions")
    want = {name: job.report.get(name, 0) for name in numbers}
    for name in ("snapshots", "answer_points"):
        want[name] = sorted(job.report.get(name, ()))
    want["miss_reason"] = job.report.get("miss_reason")
    want["chunks"], want["finish_reason"] = job.chunks, job.reason
    want["num_output_tokens"] = job.num_outputs
    assert {name: got[name] for name in want} == want, line
