"""A picture of a replay: requests as rows over time, and what the steps carried.

matplotlib is imported here and nowhere else; import this module only to draw.
"""

import heapq
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from jaxsched.simulation.metrics import metrics
from jaxsched.simulation.replay import Replay
from jaxsched.simulation.replay_clock import NEVER_PS
from jaxsched.simulation.replay_state import FinishReason

PREFILL = "#2166ac"
PREFILL_LIGHT = "#5b9bd5"
DECODE = "#8cc98a"
WAITING = "#cfcfcf"
SEATED = "#c6d7ea"
SNAPSHOT = "#e66101"
CANCELLED = "#b2182b"

_PS_PER_S = 1e12
_MAX_LABELS = 60
_MAX_LANES = 80
_NUM_BINS = 600
_DPI = 150


class _Rows(NamedTuple):
    """Times of all requests in seconds; NaN: never."""

    arrival: np.ndarray
    admitted: np.ndarray
    first_token: np.ndarray
    finish: np.ndarray


def draw_timeline(run: Replay) -> Figure:
    """Draws a replay; save it with `figure.savefig`.

    Up to 60 requests have a row each, in order of arrival; more than that share lanes,
    each taking the first one that is free when it arrives, or, where very many wait,
    when it is admitted. Grey while a request waits
    for a row of the table, pale while it holds one, blue for every chunk of its prompt
    (two blues in turn), green from the first token on; orange ticks below a bar are
    snapshots. Underneath: what the steps carried of the token budget, and how many
    requests stood where.
    """
    rows = _Rows(
        *(_seconds(t) for t in (run.arrival, run.admitted, run.first_token, run.finish))
    )
    end = float(np.nanmax(np.append(rows.finish, 1e-9)))
    named = len(rows.arrival) <= _MAX_LABELS
    place, with_waits = _places(rows, named)
    tall = float(np.clip(0.17 * (place.max(initial=0) + 1), 2.8, 9.0))
    figure = Figure(figsize=(14.0, tall + 4.3), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    top, tokens, counts = figure.subplots(
        3, 1, sharex=True, height_ratios=(tall, 1.25, 1.25)
    )
    _draw_rows(top, run, rows, place, with_waits)
    _label_rows(top, run, named, with_waits)
    _draw_tokens(tokens, run, end)
    _draw_counts(counts, rows, end)
    top.set_xlim(-0.01 * end, 1.01 * end)
    counts.set_xlabel("seconds since the first arrival")
    for axes in (top, tokens, counts):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#eeeeee", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.suptitle(_title(run), x=0.01, ha="left", fontsize=11)
    return figure


def _places(rows: _Rows, named: bool) -> tuple[np.ndarray, bool]:
    """The row that each request is drawn in, and whether its wait fits in there."""
    if named:
        return np.arange(len(rows.arrival)), True
    place = _lanes(rows.arrival, rows.finish)
    if place.max() < _MAX_LANES:
        return place, True
    # A long queue would push everything apart: the panel of counts shows it.
    return _lanes(rows.admitted, rows.finish), False


def _lanes(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """The first lane that is free when a request starts, i64[N]."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    place = np.zeros(len(start), np.int64)
    for index in np.argsort(start, kind="stable"):
        if np.isnan(start[index]):
            continue
        while busy and busy[0][0] <= start[index]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        place[index] = heapq.heappop(free) if free else len(busy)
        over = start[index] if np.isnan(stop[index]) else stop[index]
        heapq.heappush(busy, (float(over), int(place[index])))
    return place


def _seconds(times: np.ndarray) -> np.ndarray:
    return np.where(times == NEVER_PS, np.nan, times / _PS_PER_S)


def _title(run: Replay) -> str:
    found = metrics(run)
    config = run.config
    limit = config.max_num_batched_tokens
    budget = f"{limit:,}" if limit else "unlimited"
    name = run.workload.name.rsplit("/", 1)[-1]
    line = (
        f"{config.rules}, {config.chunking_policy}, {config.snapshot_mode}; "
        f"budget {budget} tokens a step, unit {config.unit}; "
        f"snapshots landed: {found['num_snapshots_landed']:,} of "
        f"{found['num_snapshots_due']:,} due"
    )
    if found["ttft_ms_p50"] is not None:
        line += (
            f"; time to first token p50 {found['ttft_ms_p50']:,.0f} ms, "
            f"p99 {found['ttft_ms_p99']:,.0f} ms"
        )
    return f"{name}: {found['num_requests']:,} requests\n{line}"


def _draw_rows(
    axes: Axes, run: Replay, rows: _Rows, place: np.ndarray, with_waits: bool
) -> None:
    height, below = 0.62, 0.44
    stop = np.fmin(rows.admitted, rows.finish)
    if with_waits:
        _bars(axes, place, rows.arrival, stop, 0.26, WAITING)
    _bars(axes, place, rows.admitted, _seated_until(rows), height, SEATED)
    _bars(axes, place, rows.first_token, rows.finish, height, DECODE)

    start = _seconds(run.step_start)[run.chunk_step]
    end = start + (run.step_duration / _PS_PER_S)[run.chunk_step]
    row = place[run.chunk_request]
    turn = _chunk_numbers(run) % 2 == 1
    for mine, colour in ((~turn, PREFILL), (turn, PREFILL_LIGHT)):
        _bars(axes, row[mine], start[mine], end[mine], height, colour)

    # Ticks hang below the bars: on them, close ones would hide the chunks.
    landed = np.any(run.chunk_points >= 0, axis=1)
    ticks = np.stack([end[landed]] * 2, axis=1)
    at = row[landed][:, None] + np.array([[height / 2, height / 2 + below * 0.6]])
    axes.add_collection(
        LineCollection(np.stack([ticks, at], axis=2), colors=SNAPSHOT, linewidths=0.7)
    )
    gone = run.finish_reason == FinishReason.CANCELLED
    gone &= with_waits | ~np.isnan(rows.admitted)
    axes.plot(
        rows.finish[gone],
        place[gone],
        linestyle="",
        marker="x",
        markersize=4.5,
        color=CANCELLED,
    )
    axes.set_ylim(place.max(initial=0) + 0.8, -0.7)
    shown = {
        "waits": bool(np.any(stop > rows.arrival)),
        "snapshots": bool(np.any(landed)),
        "cancelled": bool(np.any(gone)),
    }
    _draw_legend(axes, **shown)


def _seated_until(rows: _Rows) -> np.ndarray:
    return np.where(np.isnan(rows.first_token), rows.finish, rows.first_token)


def _label_rows(axes: Axes, run: Replay, named: bool, with_waits: bool) -> None:
    if named:
        names = [str(request.request_id) for request in run.workload.requests]
        axes.set_yticks(np.arange(len(names)), names, fontsize=7)
        axes.tick_params(axis="y", length=0)
    else:
        text = "lanes: a request takes the first free one"
        if not with_waits:
            text += "\nonce it is admitted (who waits is counted below)"
        axes.set_ylabel(text, fontsize=8)
        axes.tick_params(axis="y", labelsize=8)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_legend(axes: Axes, waits: bool, snapshots: bool, cancelled: bool) -> None:
    marks = [
        (Patch(color=SEATED), "admitted, not scheduled"),
        ((Patch(color=PREFILL), Patch(color=PREFILL_LIGHT)), "prefill chunks, in turn"),
        (Patch(color=DECODE), "decode"),
    ]
    if waits:
        marks.insert(0, (Patch(color=WAITING), "waiting to be admitted"))
    if snapshots:
        marks.append((_mark(SNAPSHOT, "|"), "snapshot filed"))
    if cancelled:
        marks.append((_mark(CANCELLED, "x"), "cancelled"))
    axes.legend(
        *zip(*marks, strict=True),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(marks),
        frameon=False,
        fontsize=8,
        borderaxespad=0.2,
        handlelength=1.6,
    )


def _mark(colour: str, marker: str) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, linestyle="")


def _chunk_numbers(run: Replay) -> np.ndarray:
    """How many chunks of its own request each chunk comes after, i64[K]."""
    order = np.argsort(run.chunk_request, kind="stable")
    sorted_requests = run.chunk_request[order]
    first = np.searchsorted(sorted_requests, sorted_requests)
    numbers = np.empty_like(order)
    numbers[order] = np.arange(len(order)) - first
    return numbers


def _bars(
    axes: Axes,
    row: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    height: float,
    colour: str,
) -> None:
    """Horizontal bars; those without a start or an end are left out."""
    drawn = ~(np.isnan(start) | np.isnan(end)) & (end > start)
    row, start, end = row[drawn], start[drawn], end[drawn]
    low, high = row - height / 2, row + height / 2
    corners = np.stack(
        [
            np.stack([start, low], axis=1),
            np.stack([start, high], axis=1),
            np.stack([end, high], axis=1),
            np.stack([end, low], axis=1),
        ],
        axis=1,
    )
    axes.add_collection(
        PolyCollection(corners, facecolors=colour, edgecolors="none", linewidths=0),
        autolim=True,
    )


def _draw_tokens(axes: Axes, run: Replay, end: float) -> None:
    """Tokens of the step under way, averaged over each slice of time."""
    edges = np.linspace(0, end, _NUM_BINS + 1)
    decode = _averages(run, run.step_decode_tokens, edges)
    prefill = _averages(run, run.step_prefill_tokens, edges)
    middle = (edges[1:] + edges[:-1]) / 2
    axes.stackplot(
        middle, decode, prefill, colors=(DECODE, PREFILL), linewidth=0, step="mid"
    )
    budget = run.config.max_num_batched_tokens
    highest = float((decode + prefill).max(initial=0))
    if budget and budget < 4 * highest:
        axes.axhline(budget, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(
            f"budget {budget:,}",
            (1.0, budget),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=7,
        )
        highest = max(highest, budget)
    axes.set_ylim(0, 1.18 * highest or 1)
    axes.set_ylabel("tokens a step", fontsize=8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.tick_params(labelsize=8)


def _averages(run: Replay, tokens: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Mean over time of the tokens of the running step, idle time counting 0."""
    start = run.step_start / _PS_PER_S
    stop = start + run.step_duration / _PS_PER_S
    times = np.stack([start, stop], axis=1).ravel()
    spent = np.cumsum(tokens * (stop - start))
    before = np.concatenate([np.zeros(1), spent])[: len(spent)]
    total = np.stack([before, spent], axis=1).ravel()
    if not len(total):  # every request was refused
        return np.zeros(len(edges) - 1)
    reached = np.interp(edges, times, total, left=0)
    return np.diff(reached) / np.diff(edges)


def _draw_counts(axes: Axes, rows: _Rows, end: float) -> None:
    """How many requests decode, prefill and wait, over time."""
    at = np.linspace(0, end, 2 * _NUM_BINS)
    spans = (
        (rows.first_token, rows.finish),
        (rows.admitted, _seated_until(rows)),
        (rows.arrival, np.fmin(rows.admitted, rows.finish)),
    )
    counts = [_number_inside(start, stop, at) for start, stop in spans]
    axes.stackplot(
        at, *counts, colors=(DECODE, PREFILL_LIGHT, WAITING), linewidth=0, step="post"
    )
    axes.set_ylim(0, None)
    axes.set_ylabel("requests", fontsize=8)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    axes.tick_params(labelsize=8)


def _number_inside(start: np.ndarray, stop: np.ndarray, at: np.ndarray) -> np.ndarray:
    known = ~(np.isnan(start) | np.isnan(stop))
    begun = np.searchsorted(np.sort(start[known]), at, side="right")
    over = np.searchsorted(np.sort(stop[known]), at, side="right")
    return begun - over
