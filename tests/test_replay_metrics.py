"""The figures of a replay are those that its per-request times and points give."""

import json

import numpy as np
import pytest

from jaxsched.simulation.metrics import metrics, request_report
from jaxsched.simulation.replay import Replay, replay
from jaxsched.simulation.replay_config import ReplayConfig
from jaxsched.simulation.workloads import WorkloadBuilder
from oracles.planner_points import published_points

CONFIG = ReplayConfig(
    max_num_seqs=4,
    max_num_batched_tokens=96,
    block_size=16,
    snapshot_interval=24,
    snapshot_from_start=(30, 48),
    snapshot_from_end=(0, 7),
    save_last=True,
)


@pytest.fixture(scope="module")
def run() -> Replay:
    builder = WorkloadBuilder("drawn")
    for index in range(13):
        length = 10 + 53 * index % 211
        builder.add(
            request_id=index,
            where=f"drawn:{index}",
            arrival_ns=(index // 3) * 7_000_000,
            prompt=[builder.span(("own", index), length)],
            max_new_tokens=1 + 7 * index % 20,
            snapshot_points=(1, 20 + index) if index % 2 else (),
            cancel_at_ns=index * 2_500_000 + 9_000_000 if index % 4 == 1 else None,
        )
    return replay(builder.build("drawn"), CONFIG)


def test_due_points_are_the_published_ones_that_were_reached(run):
    due = landed = 0
    for request, line in zip(run.workload.requests, request_report(run), strict=True):
        points = published_points(
            request.num_prompt_tokens,
            True,
            CONFIG.snapshot_interval,
            CONFIG.snapshot_from_start,
            CONFIG.snapshot_from_end,
            request.snapshot_points,
            CONFIG.save_last,
            CONFIG.block_size,
        )
        reached = max(line["chunks"], default=0)
        mine = [point for point in points if point <= reached]
        answer = set()
        if line["finish_reason"] == "length":  # the last token is not computed
            answer.add(request.num_prompt_tokens + line["num_output_tokens"] - 1)
        assert line["snapshots"] == sorted(answer.union(mine))
        due, landed = due + len(mine), landed + len(set(mine) & set(line["snapshots"]))
    found = metrics(run)
    assert found["num_cancelled"] > 0 and found["num_finished"] > 0
    assert found["num_snapshots_due"] == due
    assert found["num_snapshots_landed"] == landed > 0


def test_percentiles_and_rates_follow_from_the_requests(run):
    lines, found = list(request_report(run)), metrics(run)
    done = [line for line in lines if line["finish_reason"] == "length"]
    for name, values in (
        ("ttft_ms", [x["ttft_ms"] for x in lines if x["ttft_ms"] is not None]),
        ("e2e_ms", [line["e2e_ms"] for line in done]),
    ):
        for percentile in (50, 90, 99):
            want = np.percentile(values, percentile)
            assert found[f"{name}_p{percentile}"] == pytest.approx(want)
        assert found[f"{name}_mean"] == pytest.approx(np.mean(values))
    end = max(line["arrival_ms"] + line["e2e_ms"] for line in lines) / 1000
    assert found["duration_s"] == pytest.approx(end)
    assert found["requests_per_s"] == pytest.approx(len(done) / end)
    outputs = sum(line["num_output_tokens"] for line in lines)
    assert found["num_output_tokens"] == outputs
    prompts = sum(max(line["chunks"], default=0) for line in lines)
    assert found["num_prefill_tokens"] == prompts
    # The first output of a request comes with its prompt's last chunk.
    first = sum(line["num_output_tokens"] > 0 for line in lines)
    assert found["num_decode_tokens"] == outputs - first
    json.dumps([found, lines], allow_nan=False)


def test_the_most_running_are_counted_where_one_enters(run):
    most = 0
    for at in run.admitted.tolist():
        inside = (run.admitted <= at) & (run.finish > at)
        most = max(most, int(np.sum(inside)))
    assert metrics(run)["max_running"] == most == 4
