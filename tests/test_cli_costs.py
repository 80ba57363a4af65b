"""The costs command: its figures add up, and what is wrong is said in one line."""

import json

import pytest

from jaxsched.__main__ import main


def test_figures_add_up_and_the_line_is_the_library_s(capsys):
    arguments = ["costs", "--model", "Nemotron-3-Nano-30B-A3B", "--hardware", "h100"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hardware"] == "H100" and len(found["step_ms"]) == 6
    for times in found["step_ms"].values():
        parts = [value for kind, value in times.items() if kind != "all"]
        assert times["all"] == pytest.approx(sum(parts)) and times["all"] > 0
    assert found["step_ms"]["prompt 8,192"]["scan"] > 0
    assert found["step_ms"]["decode 1 x 2,048"]["scan"] == 0
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert f"--step-ms {found['replay_line']['step_ms']:.3f}" in shown
    assert "state_update" in shown and "collective" not in shown


def test_more_devices_take_less_time(capsys):
    times = []
    for ranks in ("1", "4"):
        arguments = ["costs", "--model", "Nemotron-H-8B", "--tensor-parallel", ranks]
        assert main([*arguments, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        times.append(found["step_ms"]["prompt 8,192"])
    assert times[1]["all"] < times[0]["all"] / 2
    assert times[1]["collective"] > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--model is missing"),
        (["--model", "Nemotron-H-9B"], "is neither a known name nor a config.json"),
        (["--model", "Bamba-9B", "--hardware", "V100"], "hardware must be one of H200"),
        (["--model", "Bamba-9B", "--tensor-parallel", "3"], "tensor_parallel=3 must"),
        (["--model", "Bamba-9B", "--weights-dtype", "int3"], "weights type must be"),
        (["--model", "Bamba-9B", "--max-num-seqs", "0"], "max_rows must be >= 1"),
    ],
)
def test_bad_input_ends_with_one_line_and_status_two(arguments, message, capsys):
    assert main(["costs", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1
