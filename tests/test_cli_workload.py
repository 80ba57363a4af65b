"""The workload command: what it writes is read back, and what is wrong is said."""

import json

import pytest

from jaxsched.__main__ import main
from jaxsched.simulation.generators_kinds import KINDS
from jaxsched.simulation.workloads_reading import read_workload


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_file_of_every_kind_is_read_back(kind, tmp_path, capsys):
    path = tmp_path / "made.jsonl"
    arguments = ["workload", kind, "--param", "requests=12", "--rate", "3"]
    assert main([*arguments, "-o", str(path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    read = read_workload(str(path))
    assert len(read.requests) == figures["num_requests"] == 12
    total = sum(r.num_prompt_tokens for r in read.requests)
    assert figures["num_prompt_tokens"] == total
    assert figures["requests_per_second"] == pytest.approx(3, rel=1e-6)
    assert 0 <= figures["reusable_share"] < 1
    assert figures["file"] == str(path)


def test_without_a_file_the_lines_are_the_output(capsys):
    assert main(["workload", "chat", "--param", "requests=4", "--seed", "7"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 4 and all(line["segments"] for line in lines)


def test_people_get_a_sentence_and_a_list(tmp_path, capsys):
    path = tmp_path / "made.jsonl"
    assert main(["workload", "bursts", "--param", "requests=1", "-o", str(path)]) == 0
    assert "1 requests (all at once)" in capsys.readouterr().out
    assert main(["workload", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{kind}:" in shown for kind in KINDS)
    assert "think_time_s=15" in shown
    assert main(["workload", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chat"]["turns"] == 5.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "KIND is missing: one of chat"),
        (["talk"], "kind must be one of chat"),
        (["chat", "--param", "turns"], "--param must be NAME=VALUE, got 'turns'"),
        (["chat", "--param", "turnz=3"], "no parameter 'turnz': did you mean turns?"),
        (["chat", "--param", "turns=many"], "turns must be a number, got 'many'"),
        (["chat", "--param", "turns=1", "--param", "turns=2"], "turns is given twice"),
        (["chat", "--param", "seed=2"], "there is an option of its own"),
        (["chat", "--rate", "0"], "requests_per_second must be above 0, got 0.0"),
        (["chat", "-o", "/nowhere/made.jsonl"], "/nowhere does not exist"),
        (["chat", "-o", "/"], "is a folder"),
    ],
)
def test_bad_input_ends_with_one_line_and_status_two(arguments, message, capsys):
    assert main(["workload", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1
