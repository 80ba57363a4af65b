"""The replay command's pages: each file is what its name says, or nothing is run."""

import json

import pytest

from jaxsched.__main__ import main

SMALL = ("--max-num-seqs", "4", "--block-size", "32", "--max-num-batched-tokens", "128")
LINES = (
    {"id": "a", "timestamp": 0, "segments": [["x", 200]], "output_length": 3},
    {"id": "b", "timestamp": 1, "segments": [["x", 40]], "output_length": 1},
    {"id": 3, "timestamp": 2, "segments": [["z", 400]], "output_length": 50},
)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return str(path)


def test_one_run_writes_every_page(trace, tmp_path, capsys):
    names = {
        "--overview": tmp_path / "run.svg",
        "--html": tmp_path / "run.html",
        "--trace-json": tmp_path / "run.json",
    }
    options = [str(part) for pair in names.items() for part in pair]
    limits = ["--limit-ttft-ms", "12", "--limit-tpot-ms", "100"]
    assert main(["replay", trace, *SMALL, *options, *limits, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["goodput"]["limits"]["ttft_ms"] == 12
    assert 0 < found["goodput"]["num_good"] < found["num_requests"] == 3
    assert names["--overview"].read_text().startswith("<?xml")
    page = names["--html"].read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "limit ttft_ms" in page
    events = json.loads(names["--trace-json"].read_text())["traceEvents"]
    slices = {event["name"] for event in events if event["ph"] == "X"}
    assert {"a", "b", "3", "decode"} <= slices


@pytest.mark.parametrize(
    "options, message",
    [
        (["--overview", "run.gif"], "run.gif: --overview writes .png, .pdf, .svg"),
        (["--html", "/nowhere/run.html"], "the folder /nowhere does not exist"),
        (["--trace-json", "/"], "is a folder"),
        (["--limit-tpot-ms", "0"], "--limit-tpot-ms must be above 0, got 0"),
        (["--limit-ttft-ms", "nan"], "--limit-ttft-ms must be above 0, got nan"),
    ],
)
def test_what_cannot_be_written_is_refused_first(trace, options, message, capsys):
    assert main(["replay", trace, *options]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1
