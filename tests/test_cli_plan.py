"""The `plan` command: one answer a line in order, or status 2 and one clear line."""

import gzip
import io
import json

import pytest

from jaxsched.__main__ import main

POINTS = {"num_prompt_tokens": 150, "snapshot_interval": 64, "offsets_from_end": [0]}
PLAN = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 100,
    "chunk_unit_size": 32,
    "requests": [
        {"id": 7, "num_prompt_tokens": 300},
        {"id": 8, "num_prompt_tokens": 9, "in_flight": True},
    ],
}
ANSWERS = (
    [64, 128, 150],
    {"prefill": [{"id": 7, "num_scheduled_tokens": 96, "num_draft_tokens": 0}]},
)


def _file(tmp_path, *lines):
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_kinds_may_be_mixed_and_keep_their_order(tmp_path, capsys):
    lines = [json.dumps(PLAN), "", json.dumps({"case": 1, "input": POINTS})]
    assert main(["plan", _file(tmp_path, *lines)]) == 0
    plan, points = map(json.loads, capsys.readouterr().out.splitlines())
    assert points == ANSWERS[0]
    assert plan["prefill"] == ANSWERS[1]["prefill"]


def test_standard_input_and_gzip_are_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(POINTS)))
    assert main(["plan"]) == 0
    packed = tmp_path / "cases.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(POINTS).encode()))
    assert main(["plan", str(packed)]) == 0
    assert capsys.readouterr().out.splitlines() == ["[64,128,150]"] * 2


def test_check_counts_and_shows_what_differs(tmp_path, capsys):
    good = json.dumps({"input": POINTS, "expected": ANSWERS[0]})
    bad = json.dumps({"input": PLAN, "expected": {"prefill": []}})
    error = json.dumps({"input": PLAN, "expected": {"error": True}})
    assert main(["plan", "--check", _file(tmp_path, good)]) == 0
    assert capsys.readouterr().out == "matched 1 of 1\n"
    path = _file(tmp_path, good, bad, error)
    assert main(["plan", "--check", path]) == 1
    out = capsys.readouterr().out
    assert f"{path}:2" in out and f"{path}:3" in out
    assert out.endswith("matched 1 of 3\n")


def test_explain_shows_a_row_for_each_request(tmp_path, capsys):
    refused = {
        **PLAN,
        "rules": "tensorrt_llm",
        "chunking_policy": "force_chunk",
        "max_context_length": 8,
    }
    path = _file(tmp_path, json.dumps(PLAN), json.dumps(POINTS), json.dumps(refused))
    assert main(["plan", "--explain", path]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "0 -> 96 of 300" in out
    assert "in_flight: an earlier step still holds it" in out
    assert "3 snapshot points" in out
    assert "refused: max_context_length is below chunk_unit_size" in out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"requests": [', "cases.jsonl:2: not valid JSON at column"),
        ("[1, 2]", "cases.jsonl:2: a case must be a JSON object"),
        ('{"num_prompt_tokens": NaN}', "cases.jsonl:2: NaN is not a number"),
        ('{"num_prompt_tokens": 1e400}', "cases.jsonl:2: num_prompt_tokens must"),
        ('{"input": 3}', "cases.jsonl:2: a case must be a JSON object, got 3"),
        (
            json.dumps({**PLAN, "requests": [{"id": 0, "num_prompt_tokens": 2**31}]}),
            "cases.jsonl:2: requests[0].num_prompt_tokens must be <= 1073741822",
        ),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_printed(tmp_path, capsys, line, words):
    assert main(["plan", _file(tmp_path, json.dumps(POINTS), line)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert len(captured.err.splitlines()) == 1


def test_files_that_cannot_be_used_are_named(tmp_path, capsys):
    packed = gzip.compress(json.dumps(POINTS).encode() * 99)
    (tmp_path / "cut.gz").write_bytes(packed[:-9])
    (tmp_path / "latin.jsonl").write_bytes(b'{"a": "\xe9"}')
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("absent.jsonl", "cut.gz", "latin.jsonl", "empty.jsonl"):
        assert main(["plan", str(tmp_path / name)]) == 2
        captured = capsys.readouterr()
        assert name in captured.err and len(captured.err.splitlines()) == 1
    unanswered = _file(tmp_path, json.dumps({"input": POINTS}))
    assert main(["plan", "--check", unanswered]) == 2
    assert ":1: expected is missing" in capsys.readouterr().err
