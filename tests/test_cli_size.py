"""Invariant: `size` prints figures that add up, or one line that says what is wrong."""

import argparse
import json

import pytest

from jaxsched.cli import size
from jaxsched.cli.reading import InputError


def parse(*argv):
    parser = argparse.ArgumentParser()
    size.add_parser(parser.add_subparsers())
    return parser.parse_args(["size", *argv])


def report(capsys, *argv):
    args = parse(*argv, "--json")
    assert args.run(args) == 0
    return json.loads(capsys.readouterr().out)


NANO = ("--model", "nemotron-3-nano-30b-a3b", "--memory", "141GB")


def test_figures_add_up(capsys):
    found = report(capsys, *NANO, "--snapshot-interval", "8192")
    parts = ("weight_bytes", "live_state_bytes", "kv_bytes", "snapshot_bytes")
    together = sum(found[part] for part in (*parts, "unused_bytes"))
    assert together == found["usable_bytes"] == 126_900_000_000
    assert found["num_live_slots"] == 257
    assert found["num_tokens"] == found["num_blocks"] * 64
    ratio = found["num_tokens"] / found["num_snapshots"]
    assert abs(ratio - 8192) < 64
    assert found["unused_bytes"] < found["state_bytes"]
    assert found["snapshot_costs_blocks"] == -(-49_082_368 // (6_144 * 64))


def test_one_more_snapshot_costs_what_is_said(capsys):
    few = report(capsys, *NANO, "--num-snapshots", "100")
    more = report(capsys, *NANO, "--num-snapshots", "101")
    lost = few["num_blocks"] - more["num_blocks"]
    assert few["snapshot_costs_blocks"] - 1 <= lost <= few["snapshot_costs_blocks"]


def test_parallel_ranks(capsys):
    model = ("--model", "Qwen3-Next-80B-A3B", "--memory", "141GB")
    parallel = ("--tensor-parallel", "4", "--pipeline-parallel", "2")
    found = report(capsys, *model, *parallel, "--pipeline-rank", "1")
    assert found["num_attention_layers"] == 6 and found["num_state_layers"] == 18
    assert found["num_kv_heads"] == 1
    assert found["kv_bytes_per_token"] == 24_576 // 2 // 2
    assert found["num_live_slots"] == 513


def test_the_kernel_decides_the_block_size(capsys):
    small = ("--block-size", "32")
    assert report(capsys, *NANO, *small)["block_size"] == 32
    forced = report(capsys, *NANO, *small, "--attention-kernel", "flashmla")
    assert forced["block_size"] == 64


def test_narrow_types_and_measured_weights(capsys):
    wide = report(capsys, *NANO)
    narrow = report(capsys, *NANO, "--kv-dtype", "float8", "--state-dtype", "bfloat16")
    assert narrow["kv_bytes_per_token"] * 2 == wide["kv_bytes_per_token"]
    assert narrow["state_bytes"] == 24_965_120
    assert report(capsys, *NANO, "--weight-bytes", "40GB")["weight_bytes"] == 40 * 10**9


def test_the_table_of_a_hybrid_model(capsys):
    args = parse(*NANO, "--snapshot-interval", "8192")
    assert args.run(args) == 0
    printed = capsys.readouterr().out
    for text in ("31.6 billion weights", "live states", "snapshots", "49.08 MB"):
        assert text in printed
    assert "One more snapshot or live state costs 49.08 MB: 125 blocks" in printed


def _config(tmp_path):
    config = {
        "model_type": "mamba2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path / "config.json")


def test_a_model_without_attention(capsys, tmp_path):
    path = _config(tmp_path)
    found = report(capsys, "--model", path, "--memory", "1GB")
    assert (found["kv_bytes_per_token"], found["num_tokens"]) == (0, 0)
    assert found["state_in_kv_tokens"] is found["num_full_contexts"] is None
    args = parse("--model", path, "--memory", "1GB")
    assert args.run(args) == 0
    assert "whatever its length" in capsys.readouterr().out


def test_models_are_listed(capsys):
    args = parse("--list")
    assert args.run(args) == 0
    assert "Kimi-Linear-48B-A3B" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--memory", "80GB"], "--model is missing"),
        (["--model", "nothing"], "model 'nothing' is neither a known name"),
        ([*NANO, "--memory", "much"], "--memory must be like 141GB"),
        ([*NANO, "--memory", "60GB"], "the weights of 63155109888 bytes"),
        ([*NANO, "--memory-fraction", "1.5"], "--memory-fraction must be in"),
        ([*NANO, "--max-num-seqs", "2000"], "lower max_num_seqs"),
        ([*NANO, "--block-size", "0"], "block_size must be >= 1"),
        ([*NANO, "--tensor-parallel", "3"], "tensor_parallel=3 must divide"),
        ([*NANO, "--pipeline-parallel", "0"], "pipeline_parallel must be >= 1"),
        ([*NANO, "--pipeline-rank", "1"], "--pipeline-rank must be <= 0"),
        ([*NANO, "--kv-dtype", "float3"], "kv type must be one of"),
        ([*NANO, "--snapshot-interval", "-4"], "snapshot_interval must be >= 0"),
        ([*NANO, "--num-snapshots", "99999"], "set it to at most"),
        ([*NANO, "--max-context-length", "-5"], "--max-context-length must be >= 1"),
    ],
)
def test_bad_input_is_one_clear_line(argv, message):
    args = parse(*argv)
    with pytest.raises(InputError, match=message) as raised:
        args.run(args)
    assert "\n" not in str(raised.value)
