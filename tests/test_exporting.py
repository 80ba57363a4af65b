"""A planner from a file plans what the live one plans."""

import dataclasses
import json
import random
import zipfile

import numpy as np
import pytest

import jaxsched as js
from jaxsched.__main__ import main
from jaxsched.scheduling.exporting import (
    ExportedPlanner,
    ExportError,
    export_planner,
    plan_layout,
)
from jaxsched.scheduling.packed import Layout, fields

CONFIGS = (
    js.SchedulerConfig(),
    js.SchedulerConfig(chunking_policy="equal_progress", snapshot_mode="emit"),
    js.SchedulerConfig(rules="tensorrt_llm"),
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The first configuration at two sizes."""
    path = tmp_path_factory.mktemp("exported") / "planner.jaxsched"
    export_planner(path, CONFIGS[0], [32, 16])
    return path


def draw(seed):
    """Records of requests, and limits."""
    rng = random.Random(seed)
    records = [
        {
            "num_prompt_tokens": rng.choice((1, 40, 333, 1000)),
            "num_draft_tokens": rng.choice((0, 3)),
            "snapshot_points": sorted(rng.sample(range(1, 400), 2)),
            "lora_id": rng.choice((-1, 1)),
            "priority": rng.choice((0, 2)),
        }
        for _ in range(rng.randint(0, 16))
    ]
    limits = {
        "max_num_batched_tokens": rng.choice((64, 500, None)),
        "max_num_seqs": rng.choice((3, 16)),
        "chunk_unit_size": rng.choice((1, 16)),
    }
    return records, limits


def planned(planner, table, limits):
    for name, value in fields(table).items():
        planner.requests[name][: len(value)] = value
    for name, value in fields(limits).items():
        planner.limits[name][...] = value
    return planner.plan()


def check_same(found, expected):
    for name, value in fields(expected).items():
        np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)
        assert getattr(found, name).dtype == np.asarray(value).dtype, name


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: str(c.chunking_policy))
def test_the_file_plans_like_the_live_planner(config, tmp_path):
    path = tmp_path / "planner"
    export_planner(path, config, [16])
    loaded = ExportedPlanner(path).planner(16)
    live = js.HostPlanner(config, 16)
    busy = 0
    for seed in range(20):
        records, limits = draw(seed)
        table = js.request_table(records, num_rows=16, num_points=8)
        limits = js.budget(**limits)
        expected = planned(live, table, limits)
        check_same(planned(loaded, table, limits), expected)
        busy += int(expected.num_batched_tokens > 0)
    assert busy > 10


def test_the_smallest_table_that_is_large_enough_is_taken(exported):
    planners = ExportedPlanner(exported)
    assert planners.rows == (16, 32) and planners.config == CONFIGS[0]
    assert planners.planner(17).requests["phase"].shape == (32,)
    with pytest.raises(ExportError, match="at most 32 rows, 33 requests do not fit"):
        planners.planner(33)


def test_both_kinds_of_machine_are_in_the_file(exported):
    assert ExportedPlanner(exported).platforms == ("cpu", "cuda")
    export_planner(exported.with_name("gpu"), CONFIGS[0], [16], platforms=["cuda"])
    with pytest.raises(ExportError, match="gpu: made for cuda, this is cpu"):
        ExportedPlanner(exported.with_name("gpu")).planner(1)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: str(c.snapshot_mode))
def test_the_layout_of_answers_is_that_of_plans(config):
    limits = js.budget(max_num_batched_tokens=64)
    plan = js.schedule(js.request_table([], num_rows=4), limits, config)
    assert plan_layout(4, config.num_emit_columns) == Layout.of(fields(plan))


def test_files_that_are_not_planners_are_refused(exported, tmp_path):
    whole = exported.read_bytes()
    broken = tmp_path / "broken"
    for content in (b"", b"no zip", whole[:-30], whole[: len(whole) // 2]):
        broken.write_bytes(content)
        with pytest.raises(ExportError, match="broken: not a planner file"):
            ExportedPlanner(broken)
    with zipfile.ZipFile(exported) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    for change, message in (
        ({"format": 9}, "format 9, 1 can be read"),
        ({"config": {"rules": "mine"}}, "rules must be one of"),
        ({"config": None}, "not a planner file"),
    ):
        with zipfile.ZipFile(broken, "w") as archive:
            archive.writestr("manifest.json", json.dumps(manifest | change))
        with pytest.raises(ExportError, match=message):
            ExportedPlanner(broken)
    with zipfile.ZipFile(broken, "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        archive.writestr("programs/8.stablehlo", b"nonsense")
    with pytest.raises(ExportError, match="8.stablehlo cannot be read"):
        ExportedPlanner(broken).planner(1)


def test_the_command_writes_the_file(tmp_path, capsys):
    out = tmp_path / "planner.jaxsched"
    options = ["--rows", "8", "--chunking-policy", "first_come_first_served"]
    assert main(["export", str(out), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == out.stat().st_size
    found = ExportedPlanner(out)
    expected = js.SchedulerConfig(chunking_policy="first_come_first_served")
    assert dataclasses.astuple(found.config) == dataclasses.astuple(expected)
    for wrong, message in (
        (["--rows", "0"], "rows must be >= 1, got 0"),
        (["--rows", "8,8"], "rows must be different sizes"),
        (["--max-emit-points", "0"], "max_emit_points must be an integer >= 1"),
        (["--rules", "tensorrt_llm", "--snapshot-mode", "emit"], "needs rules"),
    ):
        assert main(["export", str(tmp_path / "none"), *wrong]) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
