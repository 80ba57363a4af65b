"""The replay command: its options, its reports, and what it refuses."""

import argparse
import io
import json
import re
import sys

import pytest

from jaxsched.cli import replay as command
from jaxsched.cli.reading import InputError
from jaxsched.cli.writing import write_whole
from jaxsched.simulation import replay_loop
from shared_data import shared_path

# All runs here share one bucket: few requests, four rows.
SMALL = ("--max-num-seqs", "4", "--block-size", "32", "--max-num-batched-tokens", "128")
LINES = (
    {"id": "a", "timestamp": 0, "segments": [["x", 200]], "output_length": 3},
    {"id": "b", "timestamp": 1, "segments": [["x", 40]], "output_length": 1},
    {
        **{"id": 3, "timestamp": 2, "segments": [["z", 400]], "output_length": 50},
        **{"snapshot_points": [33, 500], "cancel_at": 12},
    },
)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return str(path)


def parse(*arguments):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(["replay", *arguments])


def run(*arguments):
    args = parse(*arguments)
    assert args.run(args) == 0


def report(tmp_path, *arguments):
    out = tmp_path / "out.jsonl"
    run(*arguments, "--requests", str(out))
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_one_json_object_of_metrics(trace, capsys):
    run(trace, *SMALL, "--snapshot-interval", "64", "--json")
    out = capsys.readouterr()
    found = json.loads(out.out)
    assert out.out.count("\n") == 1 and out.err == ""
    assert (found["num_requests"], found["num_finished"]) == (3, 2)
    assert found["num_cancelled"] == 1
    due = found["num_snapshots_due"]
    assert found["num_snapshots_landed"] == due and due >= 3
    tokens = found["num_prefill_tokens"] + found["num_decode_tokens"]
    assert tokens == found["num_scheduled_tokens"]
    assert 0 < found["ttft_ms_p50"] <= found["ttft_ms_p99"] <= found["e2e_ms_p99"]
    assert 0 < found["budget_use"] <= 1 and 0 < found["busy"] <= 1


def test_a_table_says_n_of_n(trace, capsys):
    run(trace, *SMALL, "--snapshot-interval", "100", "--sequential")
    out = capsys.readouterr().out
    landed = re.search(r"snapshots landed of those due\W+(\d+) of (\d+)", out)
    assert landed[1] == landed[2] != "0"
    assert "2 of 3, 1 cancelled" in out


def test_one_line_a_request(trace, tmp_path):
    first, second, third = report(
        tmp_path, trace, *SMALL, "--snapshot-interval", "64", "--save-last"
    )
    assert (first["id"], second["id"], third["id"]) == ("a", "b", 3)
    assert first["chunks"] == [64, 128, 192, 200]
    # 202: the end of the answer, whose last token is not computed.
    assert first["snapshots"] == [64, 128, 192, 202]
    assert second["snapshots"] == [32, 40] and second["chunks"] == [32, 40]
    assert third["finish_reason"] == "cancelled" and third["snapshots"][0] == 33
    assert third["num_output_tokens"] == 0 and third["ttft_ms"] is None
    assert second["finish_reason"] == "length"
    assert second["e2e_ms"] == second["ttft_ms"] > 0
    assert first["miss_reason"] == "no_prefix" and first["num_cached_tokens"] == 0


def test_prefix_caching_off_publishes_nothing(trace, tmp_path):
    for line in report(tmp_path, trace, *SMALL, "--no-prefix-caching", "--limit", "2"):
        assert line["snapshots"] == []


def test_the_cost_line_is_exact(trace, tmp_path):
    costs = ("--step-ms", "2", "--token-us", "7", "--context-ns", "3", "--sequential")
    points = ("--snapshot-interval", "0")
    _, second, _ = report(tmp_path, trace, *SMALL, *costs, *points)
    # A chunk up to where the stored prompt goes another way, and one of the rest.
    first_chunk = 2 + 32 * 0.007 + 32 * 0.000003
    second_chunk = 2 + 8 * 0.007 + 40 * 0.000003
    assert second["ttft_ms"] == pytest.approx(first_chunk + second_chunk, rel=1e-15)
    points = (*points, "--no-branch-snapshots")
    _, second, _ = report(tmp_path, trace, *SMALL, *costs, *points)
    # One step of 40 tokens that reads its own 40 tokens.
    assert second["ttft_ms"] == 2 + 40 * 0.007 + 40 * 0.000003


def test_other_numbers_compile_nothing_new(trace, monkeypatch, capsys):
    traced = []
    schedule = replay_loop.schedule

    def counted(*args):
        traced.append(1)
        return schedule(*args)

    monkeypatch.setattr(replay_loop, "schedule", counted)
    run(trace, *SMALL, "--json")
    before = len(traced)
    run(trace, "--max-num-seqs", "3", "--block-size", "32", "--token-us", "1", "--json")
    run(trace, *SMALL, "--snapshot-interval", "7", "--no-answer-snapshots", "--json")
    run(trace, *SMALL, "--rate-scale", "0.5", "--save-last", "--json")
    assert len(traced) == before
    assert len(set(capsys.readouterr().out.splitlines())) == 4


def test_standard_input(monkeypatch, capsys):
    lines = "".join(json.dumps(line) + "\n" for line in LINES)
    buffer = io.BufferedReader(io.BytesIO(lines.encode()))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(buffer))
    run("-", *SMALL, "--json")
    assert json.loads(capsys.readouterr().out)["workload"] == "<stdin>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--no-prefix-caching", "--branch-snapshots"],
            "--branch-snapshots needs the prefix cache",
        ),
        (
            ["--answer-snapshots", "--no-prefix-caching"],
            "--answer-snapshots needs the prefix cache",
        ),
        (["--max-num-seqs", "0"], "max_num_seqs must be >= 1, got 0"),
        (["--snapshot-interval", "-4"], "snapshot_interval must be >= 0, got -4"),
        (["--snapshot-from-end", "3,-1"], r"snapshot_from_end\[1\] must be >= 0"),
        (["--chunk-unit", "4096"], "chunk_unit_size=4096 is above max_num_batched"),
        (["--max-context-length", "9"], "chunk_unit_size=64 is above max_context"),
        (["--snapshot-mode", "emit", "--rules", "tensorrt_llm"], "emit"),
        (["--rate-scale", "nan"], "rate_scale must be in .* got nan"),
        (["--rate-scale", "0"], "rate_scale must be in .* got 0"),
        (["--step-ms", "0"], "step_ms must be above 0"),
        (["--token-us", "1e9"], "token_us must be in"),
        (["--accepted-draft-tokens", "1"], "accepted_draft_tokens must be <= 0, got 1"),
        (["--hash-block", "16"], "hash_block is given but there are no hash_ids"),
        (["--plot", "timeline.bmp"], "timeline.bmp: --plot writes .png"),
        (["--requests", "/no/such/folder/x"], "the folder /no/such/folder does not"),
        (["--requests", "/"], "is a folder"),
        (["--step-ms", "400000", "--token-us", "4000000"], "token_us must be in"),
        (
            ["--rules", "tensorrt_llm", "--draft-tokens", "5"]
            + ["--max-num-batched-tokens", "5", "--chunk-unit", "1"],
            "draft_tokens must be below max_num_batched_tokens=5",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(trace, options, message):
    args = parse(trace, *options)
    with pytest.raises(InputError, match=message):
        args.run(args)


@pytest.mark.parametrize(
    "options", [["--kv-pages", "9"], ["--limit", "0"], ["--snapshot-from-start", "x"]]
)
def test_options_that_do_not_exist_are_refused(trace, options, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(trace, *options)
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_counts_that_cannot_be_held_are_refused(tmp_path):
    path = tmp_path / "long.jsonl"
    line = {"timestamp": 0, "segments": [["x", 2**29]], "output_length": 2**28}
    path.write_text("".join(json.dumps(line) + "\n" for _ in range(3)))
    args = parse(str(path), *SMALL)
    with pytest.raises(InputError, match="may hold .* tokens at once"):
        args.run(args)
    args = parse(str(path), "--max-num-seqs", "1")
    with pytest.raises(InputError, match="may last more than 160 days|a step may take"):
        args.run(args)


def test_a_prompt_that_can_never_run_is_refused_by_name(trace, tmp_path, capsys):
    whole = ("--chunking-policy", "none", "--snapshot-interval", "0")
    lines = report(tmp_path, trace, *SMALL, *whole)
    assert [line["finish_reason"] for line in lines] == ["refused", "length", "refused"]
    assert lines[0]["e2e_ms"] is None and lines[0]["chunks"] == []
    assert "2 prompts are longer than a step" in capsys.readouterr().out


def test_a_run_that_refuses_everything_still_reports(trace, tmp_path, capsys):
    plot = tmp_path / "none.png"
    whole = ("--chunking-policy", "none", "--max-num-batched-tokens", "32")
    run(trace, *SMALL[:4], *whole, "--plot", str(plot), "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["num_refused"], found["num_steps"]) == (3, 0)
    assert found["ttft_ms_p50"] is None and found["requests_per_s"] is None
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_half_a_file_is_never_seen(tmp_path):
    target = tmp_path / "out.jsonl"
    target.write_text("old")

    def fails(path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="out.jsonl: cannot be written: No space"):
        write_whole(str(target), fails)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_chunk_ends_and_snapshots_of_known_reports(tmp_path):
    cases = shared_path("golden/replay_cases.jsonl").read_text().splitlines()
    checked = 0
    for case in map(json.loads, cases):
        # What is reused is a matter of the prefix cache; chunk ends are not.
        if not set(case["expect"]) <= {"chunks", "snapshots", "finish_reason"}:
            continue
        path = tmp_path / "case.jsonl"
        path.write_text(
            "".join(json.dumps({"timestamp": 0, **r}) + "\n" for r in case["workload"])
        )
        # Few rows where the case does not care: that program is compiled already.
        options = [*SMALL[:2], *case["options"].split()]
        lines = report(tmp_path, str(path), *options)
        lines.sort(key=lambda line: line["id"])
        for key, want in case["expect"].items():
            assert [line[key] for line in lines] == want, case["name"]
        checked += 1
    assert checked >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["mooncake_conversation_head1000.jsonl", "azure2023_conv_head1000.csv"]
    + ["azure2023_code_head1000.csv", "mooncake_conversation_links_head1000.csv"]
    + ["mooncake_conv100_links.csv", "sharegpt300_llama31_links.csv"],
)
def test_whole_traces_land_every_snapshot(name, capsys):
    run(str(shared_path(f"traces/{name}")), "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["num_finished"] == found["num_requests"] > 100
    assert found["num_snapshots_landed"] == found["num_snapshots_due"] > 100
