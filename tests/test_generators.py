"""Generated workloads repeat exactly, share what they should, and survive files."""

import json
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsched.simulation.generators import generate
from jaxsched.simulation.generators_files import (
    reusable_tokens,
    scaled_to_rate,
    segment_lines,
    summary,
)
from jaxsched.simulation.generators_kinds import KINDS
from jaxsched.simulation.workloads import WorkloadBuilder, WorkloadError
from jaxsched.simulation.workloads_reading import read_workload
from shared_data import shared_path

kinds = pytest.mark.parametrize("kind", list(KINDS))


def common_prefix(one, other):
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size


def oracle_reusable(workload):
    """By token ids, against every earlier prompt with its answer."""
    found, before = [], []
    for index, request in enumerate(workload.requests):
        prompt = workload.prompt_token_ids(index)
        most = max((common_prefix(prompt, old) for old in before), default=0)
        found.append(min(most, request.num_prompt_tokens - 1))
        before.append(np.concatenate([prompt, workload.answer_token_ids(index)]))
    return found


@kinds
def test_the_same_seed_gives_the_same_workload(kind):
    one, same, other = (generate(kind, seed, requests=60) for seed in (3, 3, 4))
    assert list(segment_lines(one)) == list(segment_lines(same))
    assert list(segment_lines(one)) != list(segment_lines(other))
    # Fewer requests are the first ones of more.
    fewer = generate(kind, 3, requests=20)
    assert list(segment_lines(fewer)) == list(segment_lines(one))[:20]


@settings(max_examples=30)
@given(
    st.sampled_from(list(KINDS)),
    st.integers(0, 99),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.5, 1.5]),
    st.sampled_from([0.0, 1.0, 8.0]),
)
def test_every_workload_is_in_order_and_survives_a_file(
    tmp_path_factory, kind, seed, size, spread, burstiness
):
    made = generate(kind, seed, requests=size, spread=spread, burstiness=burstiness)
    assert len(made.requests) == size
    arrivals = [r.arrival_ns for r in made.requests]
    assert arrivals == sorted(arrivals) and arrivals[0] >= 0
    path = tmp_path_factory.mktemp("made") / "made.jsonl"
    path.write_text("".join(f"{line}\n" for line in segment_lines(made)))
    read = read_workload(str(path))
    assert read.stream_lengths == made.stream_lengths
    for one, other in zip(made.requests, read.requests, strict=True):
        for field in (
            *("request_id", "arrival_ns", "num_prompt_tokens", "max_new_tokens"),
            *("prompt", "answer", "snapshot_points", "priority", "cancel_at_ns"),
        ):
            assert getattr(one, field) == getattr(other, field)


@settings(max_examples=20)
@given(st.sampled_from(list(KINDS)), st.integers(0, 99))
def test_the_reusable_share_is_that_of_the_token_ids(kind, seed):
    small = {
        field: 30
        for field in (
            *("system_prompt_tokens", "user_tokens", "answer_tokens", "task_tokens"),
            *("tool_result_tokens", "shared_tokens", "document_tokens"),
        )
        if hasattr(KINDS[kind], field)
    }
    made = generate(kind, seed, requests=25, **small)
    assert reusable_tokens(made) == oracle_reusable(made)


def test_the_reusable_share_of_a_public_trace_is_the_published_one():
    head = read_workload(
        str(shared_path("traces/mooncake_conversation_head1000.jsonl"))
    )
    assert summary(head)["reusable_share"] == pytest.approx(0.216, abs=0.0006)


def test_reuse_stops_where_streams_part_and_starts_again_at_literals():
    builder = WorkloadBuilder("made")

    def add(name, *spans):
        fields = {"where": name, "arrival_ns": len(builder), "max_new_tokens": 2}
        builder.add(request_id=name, prompt=list(spans), **fields)

    add("a", builder.span("x", 10), builder.span("y", 5))
    add("b", builder.span("x", 10), builder.span("z", 5))
    add("c", builder.span("x", 4))
    add("d", builder.span("x", 6), builder.span("y", 5))
    add("e", builder.literal("p", [7, 8, 9]))
    add("f", builder.literal("q", [7, 8, 1]))
    made = builder.build("made")
    assert reusable_tokens(made) == [0, 10, 3, 6, 0, 2]
    assert reusable_tokens(made) == oracle_reusable(made)


def test_a_turn_of_a_chat_repeats_the_turn_before_and_its_answer():
    made = generate("chat", 1, requests=80, turns=6.0, assistants=3)
    index = {r.request_id: i for i, r in enumerate(made.requests)}
    followed = 0
    for request in made.requests:
        chat, turn = request.request_id.split(".")
        before = index.get(f"{chat}.{int(turn) - 1}")
        if before is None:
            continue
        followed += 1
        said = np.concatenate(
            [made.prompt_token_ids(before), made.answer_token_ids(before)]
        )
        prompt = made.prompt_token_ids(index[request.request_id])
        assert common_prefix(prompt, said) == len(said) < len(prompt)
        assert request.arrival_ns > made.requests[before].arrival_ns
    assert followed > 40


def test_shares_are_what_the_parameters_say():
    exact = {"spread": 0.0, "requests": 400}
    made = generate(
        "shared-prompts",
        system_prompts=1,
        system_prompt_tokens=900,
        user_tokens=100,
        **exact,
    )
    assert summary(made)["reusable_share"] == pytest.approx(399 * 900 / 400_000)
    popular, alike = (
        generate("shared-prompts", system_prompts=50, popularity=power, **exact)
        for power in (3.0, 0.0)
    )
    firsts = [{r.prompt[0].stream for r in w.requests} for w in (popular, alike)]
    assert len(firsts[0]) < len(firsts[1]) <= 50
    documents = generate("documents", questions=1.0, system_prompt_tokens=0, **exact)
    assert summary(documents)["reusable_share"] == 0


def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for():
    for burstiness in (0.0, 1.0, 9.0):
        made = generate(
            "shared-prompts",
            requests=4000,
            requests_per_second=5.0,
            burstiness=burstiness,
        )
        gaps = np.diff([r.arrival_ns for r in made.requests]) / 1e9
        assert gaps.mean() == pytest.approx(0.2, rel=0.12)
        squared = gaps.var() / gaps.mean() ** 2
        assert squared == pytest.approx(burstiness, rel=0.3, abs=1e-9)


def test_bursts_come_together():
    made = generate("bursts", burst_requests=30.0, burst_s=0.5, requests=300)
    bursts = {}
    for request in made.requests:
        bursts.setdefault(request.request_id.split(".")[0], []).append(request)
    assert statistics.mean(map(len, bursts.values())) > 10
    for requests in bursts.values():
        assert requests[-1].arrival_ns - requests[0].arrival_ns <= 0.5e9
        assert len({r.prompt[0].stream for r in requests}) == 1


def test_another_rate_keeps_everything_but_the_times():
    builder = WorkloadBuilder("made")
    for index, at in enumerate((5, 6, 9)):
        builder.add(
            request_id=index,
            where=f"made:{index}",
            prompt=[builder.span("x", 10)],
            max_new_tokens=1,
            arrival_ns=at * 10**9,
            cancel_at_ns=(at + 2) * 10**9 if index == 1 else None,
        )
    made = builder.build("made")
    fast = scaled_to_rate(made, 4)
    assert [r.arrival_ns for r in fast.requests] == [5 * 10**9, 5125000000, 5500000000]
    assert fast.requests[1].cancel_at_ns == 7125000000
    assert summary(fast)["requests_per_second"] == pytest.approx(4)
    assert [r.prompt for r in fast.requests] == [r.prompt for r in made.requests]
    assert scaled_to_rate(made, 0.5).requests == made.requests


@pytest.mark.parametrize("rate", [0, -1.0, float("inf"), float("nan"), True, "2"])
def test_rates_that_are_none_are_refused(rate):
    with pytest.raises(WorkloadError, match="requests_per_second must be"):
        scaled_to_rate(generate("chat", requests=5), rate)


def test_what_cannot_be_scaled_or_written_is_refused():
    with pytest.raises(WorkloadError, match="all requests arrive at once"):
        scaled_to_rate(generate("chat", requests=1), 2)
    builder = WorkloadBuilder("made")
    common = {"arrival_ns": 0, "max_new_tokens": 1}
    prompt = [builder.literal("x", [1, 2])]
    builder.add(request_id=0, where="made:1", prompt=prompt, **common)
    with pytest.raises(WorkloadError, match="made:1: token ids were given"):
        list(segment_lines(builder.build("made")))
    builder = WorkloadBuilder("made")
    prompt = [builder.span("x", 2, start=3)]
    builder.add(request_id=0, where="made:2", prompt=prompt, **common)
    with pytest.raises(WorkloadError, match="made:2: a prompt begins at token 3"):
        list(segment_lines(builder.build("made")))


@pytest.mark.parametrize(
    "kind, parameters, message",
    [
        ("talk", {}, "kind must be one of chat, agents.*got 'talk'"),
        ("chat", {"turn": 3}, "chat has no parameter 'turn': did you mean turns?"),
        ("chat", {"requests": 2.5}, "requests must be a whole number, got 2.5"),
        ("chat", {"requests": "x"}, "requests must be a whole number, got 'x'"),
        ("chat", {"turns": 0.5}, r"turns must be in \[1, 1000\], got 0.5"),
        ("bursts", {"spread": True}, "spread must be a number, got True"),
        ("agents", {"tool_time_s": float("nan")}, "tool_time_s must be in"),
    ],
)
def test_bad_parameters_are_refused_by_name(kind, parameters, message):
    with pytest.raises(WorkloadError, match=message):
        generate(kind, **parameters)


def test_lines_name_answers_and_keep_every_field():
    made = generate("chat", 2, requests=30, turns=8.0)
    lines = [json.loads(line) for line in segment_lines(made)]
    repeats = [name for line in lines for name, _ in line["segments"]]
    assert any(name.startswith("answer:chat") for name in repeats)
    for line, request in zip(lines, made.requests, strict=True):
        assert line["input_length"] == sum(size for _, size in line["segments"])
        assert line["output_length"] == request.max_new_tokens
