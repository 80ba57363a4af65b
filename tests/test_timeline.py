"""The timeline draws what happened: every chunk, snapshot and wait at its place."""

import io

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex

from jaxsched.simulation import timeline
from jaxsched.simulation.replay import replay
from jaxsched.simulation.replay_clock import NEVER_PS
from jaxsched.simulation.replay_config import ReplayConfig
from jaxsched.simulation.replay_state import FinishReason
from jaxsched.simulation.workloads import WorkloadBuilder

CONFIG = ReplayConfig(
    max_num_seqs=3, max_num_batched_tokens=64, block_size=16, snapshot_interval=48
)


def workload(size):
    builder = WorkloadBuilder("drawn")
    for index in range(size):
        builder.add(
            request_id=f"r{index}",
            where=f"drawn:{index}",
            arrival_ns=index * 10**6,
            prompt=[builder.span(("own", index), 20 + 37 * index % 200)],
            max_new_tokens=1 + 5 * index % 30,
            # Every fourth client leaves soon.
            cancel_at_ns=index * 10**6 + 10**7 if index % 4 == 3 else None,
        )
    return builder.build("drawn")


@pytest.fixture(scope="module")
def run():
    return replay(workload(15), CONFIG)


def bars(axes, colour):
    found = []
    for part in axes.collections:
        is_bars = isinstance(part, PolyCollection)
        if is_bars and len(part.get_facecolor()):
            if to_hex(part.get_facecolor()[0]) == colour:
                found += [path.vertices for path in part.get_paths()]
    return found


def test_every_chunk_is_a_bar_from_its_start_to_its_end(run):
    axes = timeline.draw_timeline(run).axes[0]
    drawn = bars(axes, timeline.PREFILL) + bars(axes, timeline.PREFILL_LIGHT)
    assert len(drawn) == len(run.chunk_end) > 15
    found = sorted((corners[:, 0].min(), corners[:, 0].max()) for corners in drawn)
    start = run.step_start[run.chunk_step] / 1e12
    end = start + run.step_duration[run.chunk_step] / 1e12
    assert np.allclose(found, sorted(zip(start, end, strict=True)))


def test_decodes_waits_and_snapshots_are_drawn(run):
    axes = timeline.draw_timeline(run).axes[0]
    decoded = (run.first_token != NEVER_PS) & (run.finish > run.first_token)
    assert len(bars(axes, timeline.DECODE)) == int(np.sum(decoded)) > 0
    # Who left unseen is admitted never, which is later than any arrival.
    waited = int(np.sum(run.admitted > run.arrival))
    assert len(bars(axes, timeline.WAITING)) == waited > 0
    ticks = next(p for p in axes.collections if isinstance(p, LineCollection))
    landed = run.chunk_points[:, 0] >= 0
    assert len(ticks.get_segments()) == int(np.sum(landed)) > 0


def test_few_requests_have_named_rows_and_many_share_lanes(run, monkeypatch):
    axes = timeline.draw_timeline(run).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [f"r{index}" for index in range(15)]
    monkeypatch.setattr(timeline, "_MAX_LABELS", 3)
    axes = timeline.draw_timeline(run).axes[0]
    assert "lanes" in axes.get_ylabel()
    low, high = axes.get_ylim()
    assert low < 15.5 and high < 0 and bars(axes, timeline.WAITING)
    monkeypatch.setattr(timeline, "_MAX_LANES", 4)
    axes = timeline.draw_timeline(run).axes[0]
    assert "counted below" in axes.get_ylabel()
    assert not bars(axes, timeline.WAITING)
    assert axes.get_ylim()[0] < 3.5  # as many lanes as rows of the table


def test_lanes_never_hold_two_requests_at_once():
    draw = np.random.default_rng(3)
    arrival = np.sort(draw.uniform(0, 50, 300))
    finish = arrival + draw.exponential(3, 300)
    finish[::50] = np.nan
    lanes = timeline._lanes(arrival, finish)
    over = np.where(np.isnan(finish), arrival, finish)
    for lane in range(lanes.max() + 1):
        mine = lanes == lane
        assert np.all(over[mine][:-1] <= arrival[mine][1:])
    running = (arrival[:, None] >= arrival) & (arrival[:, None] < over)
    assert lanes.max() + 1 <= running.sum(axis=1).max() + 1


def test_token_averages_keep_every_token_second(run):
    end = float(run.finish.max()) / 1e12
    edges = np.linspace(0, end, 37)
    mean = timeline._averages(run, run.step_prefill_tokens, edges)
    drawn = np.sum(mean * np.diff(edges))
    real = np.sum(run.step_prefill_tokens * (run.step_duration / 1e12))
    assert drawn == pytest.approx(real)


@pytest.mark.parametrize("form", ["png", "svg", "pdf"])
def test_pictures_are_written_whole(run, form):
    assert np.any(run.finish_reason == FinishReason.CANCELLED)
    buffer = io.BytesIO()
    timeline.draw_timeline(run).savefig(buffer, format=form)
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[form]
    assert buffer.getvalue().startswith(start)
    assert len(buffer.getvalue()) > 10_000
