"""`verify` passes on a sound folder, and fails on each thing that is wrong with one."""

import argparse
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxsched.cli import verify
from jaxsched.cli.reading import InputError
from jaxsched.models.checkpoint import read_tensors
from jaxsched.models.comparison import Comparison
from jaxsched.models.loading import load_checkpoint
from jaxsched.models.serving import ServedModel
from jaxsched.models.verification import FolderError, Options, Verifier
from model_cases import FALCON, NEMOTRON, SHARED, copy_of
from shared_data import shared_path


def run(*words):
    parser = argparse.ArgumentParser()
    verify.add_parser(parser.add_subparsers(dest="command"))
    args = parser.parse_args(["verify", *map(str, words)])
    return args.run(args)


@pytest.fixture(scope="module")
def verifier():
    """One verifier, so that its executables are compiled once."""
    config, parameters = load_checkpoint(FALCON)
    model = ServedModel(config, parameters)
    tokens = np.load(FALCON / "tokens.npy")
    made = Verifier(FALCON, model, parameters, tokens, Options(num_schedules=1))
    made.checks = list(made.run())
    return made


def test_a_sound_folder_passes_every_check(verifier):
    assert [check.name for check in verifier.checks] == [
        "one_pass_vs_reference",
        "one_pass_vs_logits.npy",
        "states_vs_snap_5.safetensors",
        "states_vs_snap_16.safetensors",
        "cuts_on_grid",
        "random_cuts",
        "one_token_chunks",
        "emitted_vs_cut_states",
        "restored",
        "decoded_vs_one_pass",
        "batched",
    ]
    for check in verifier.checks:
        assert check.passed and check.num_compared > 0, check
        assert not (check.bitwise and check.max_difference), check


@pytest.fixture
def at(verifier, tmp_path, monkeypatch):
    """The verifier, looking at a copy of its folder."""
    folder = copy_of(FALCON, tmp_path / "copy")
    monkeypatch.setattr(verifier, "folder", folder)
    return verifier


def test_logits_off_by_little_fail(at):
    logits = np.load(at.folder / "logits.npy")
    logits[1, 20, 7] += 1e-4
    np.save(at.folder / "logits.npy", logits)
    (check,) = at._against_stored_logits()
    assert not check.passed and check.num_wrong == 1
    assert check.where == "[row, token, entry] [1, 20, 7]"
    assert check.max_difference == pytest.approx(1e-4, rel=0.1)


def test_states_off_by_little_fail(at):
    path = at.folder / "snap_5.safetensors"
    states = read_tensors(path)
    states["layers.1.conv_state.0"][0, 3, 2] -= 1e-3
    save_file(states, path)
    bad, good = at._against_stored_states()
    assert good.passed and not bad.passed and bad.num_wrong == 1
    assert bad.where == "row 0, layers.1.conv_state.0 [3, 1]"


def test_states_that_do_not_fit_are_refused(at):
    path = at.folder / "snap_5.safetensors"
    states = read_tensors(path)
    save_file(states | {"layers.9.key": np.zeros((2, 1), np.float32)}, path)
    with pytest.raises(FolderError, match="layers.9.key is no state of this model"):
        list(at._against_stored_states())
    path.rename(at.folder / "snap_99.safetensors")
    with pytest.raises(FolderError, match="no position 99 in tokens.npy"):
        list(at._against_stored_states())


def test_logits_of_another_shape_are_refused(at):
    np.save(at.folder / "logits.npy", np.zeros((2, 36, 64), np.float32))
    with pytest.raises(FolderError, match=r"must be shaped \(2, 37, 64\)"):
        list(at._against_stored_logits())


def test_a_changed_bit_fails():
    right = np.array([[1.0, 0.0]], np.float32)
    for wrong in (np.nextafter(right, 2), -right):
        found = Comparison("bits", None)
        found.add("here", right, right)
        assert found.check().passed
        found.add("there", wrong, right)
        assert not found.check().passed


def test_nan_fails_any_tolerance_and_nothing_compared_passes_nothing():
    found = Comparison("close", (1e9, 1e9))
    assert not found.check().passed
    found.add("there", np.array([np.nan], np.float32), np.ones(1, np.float32))
    assert not found.check().passed and found.check().where == "there [0]"


def test_the_command_answers_in_json(verifier, monkeypatch, capsys):
    from jaxsched.models import verification

    found = (verifier.model.config, verifier.checks)
    monkeypatch.setattr(verification, "verify_folder", lambda *_: found)
    assert run(FALCON, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["passed"] and answer["family"] == "falcon_h1"
    assert answer["checks"][1]["name"] == "one_pass_vs_logits.npy"
    bad = Comparison("states", (0.0, 0.0))
    bad.add("row 0", np.array([np.nan], np.float32), np.ones(1, np.float32))
    found[1].append(bad.check())
    assert run(FALCON, "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert not answer["passed"] and answer["checks"][-1]["max_difference"] is None
    assert run(FALCON) == 1
    assert "FAIL" in capsys.readouterr().out
    found[1].pop()


@pytest.mark.parametrize(
    "name, said",
    [("tokens.npy", "not a numpy file"), ("model.safetensors", "not a whole")],
)
def test_bad_folders_are_bad_input(tmp_path, name, said):
    folder = copy_of(FALCON, tmp_path / "bad")
    (folder / name).write_bytes(b"\x93NUMPY\x01")
    with pytest.raises(InputError, match=said):
        run(folder)
    with pytest.raises(InputError, match="config.json: cannot be read"):
        run(tmp_path)


def test_tokens_must_be_in_the_vocabulary(tmp_path):
    folder = copy_of(FALCON, tmp_path / "bad")
    np.save(folder / "tokens.npy", np.full((1, 5), 64))
    with pytest.raises(InputError, match="token ids below vocab_size=64, got 64"):
        run(folder)


@pytest.mark.parametrize("words", [["--chunk-size", "0"], ["--atol", "-1"]])
def test_options_out_of_range_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        run(FALCON, *words)
    assert "must be" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_every_published_folder_passes(name):
    assert run(shared_path(f"fixtures/{name}")) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["--chunk-size", "16"], ["--no-tails"], ["--page-size", "5"]]
)
def test_other_settings_pass(words):
    assert run(NEMOTRON, *words) == 0
