"""Pictures of a sweep: its Pareto front, a map of two options, hits against memory.

matplotlib is imported here; import this module only to draw.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from jaxsched.simulation.overview import GRID, INK, MUTED, PREFILL
from jaxsched.simulation.sweep_front import HIT_RATE, SNAPSHOTS, TTFT, Advice
from jaxsched.simulation.sweep_grid import Grid, value_text

MEMORY = ("memory", "kv_blocks", "state_slots")
"""Options that say how much is kept; the first one that varies is an axis."""

_DPI = 110
_SIZE = 5.2  # inches, of one panel
_COLOURS = ("#2166ac", "#b2182b", "#4d9221", "#f4a259", "#7b3294", "#6b7280")
_MARKERS = "osD^vP"


def draw_sweep(
    grid: Grid,
    rows: Sequence[Mapping[str, object]],
    advice: Sequence[Advice],
    *,
    title: str = "",
) -> Figure:
    """Draws one panel or several side by side; save it with `figure.savefig`.

    Args:
      grid: of the sweep.
      rows: of the sweep; those that failed are left out.
      advice: see `advise`.
      title: above all panels.
    """
    rows = [row for row in rows if row.get("figures") and row["figures"][TTFT]]
    panels = [_draw_front]
    memory = next((name for name in MEMORY if name in grid.varied), None)
    if len(grid.varied) == 2:
        panels.append(_draw_map)
    if memory:
        panels.append(_draw_memory)
    figure = Figure(figsize=(_SIZE * len(panels), 4.3), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    for at, draw in enumerate(panels):
        draw(figure.add_subplot(1, len(panels), at + 1), grid, rows, advice)
    return figure


def _style(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK, weight="bold")
    axes.set_xlabel(x, fontsize=8, color=MUTED)
    axes.set_ylabel(y, fontsize=8, color=MUTED)
    axes.tick_params(labelsize=8, colors=MUTED, length=2)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)


def _by_given(grid: Grid, rows: Sequence[Mapping[str, object]]) -> dict[str, list]:
    """Rows by what is given, or all of them."""
    found: dict[str, list] = {}
    for row in rows:
        parts = (value_text(row["options"][name]) for name in grid.given)
        found.setdefault(", ".join(parts), []).append(row)
    return found


def _draw_front(
    axes: Axes,
    grid: Grid,
    rows: Sequence[Mapping[str, object]],
    advice: Sequence[Advice],
) -> None:
    """Hit rate against time to first token; the size of a mark: snapshots."""
    front = {index for one in advice for index in one.front}
    most = max((row["figures"][SNAPSHOTS] for row in rows), default=0) or 1
    for at, (name, members) in enumerate(_by_given(grid, rows).items()):
        colour = _COLOURS[at % len(_COLOURS)]
        hits = np.array([row["figures"][HIT_RATE] or 0.0 for row in members])
        times = np.array([row["figures"][TTFT] for row in members])
        sizes = [16 + 150 * row["figures"][SNAPSHOTS] / most for row in members]
        on_front = np.array([row["index"] in front for row in members])
        axes.scatter(
            *(hits, times, sizes),
            facecolors=[to_rgba(colour, 0.65 if on else 0.0) for on in on_front],
            edgecolors=colour,
            linewidths=0.9,
            label=name or None,
        )
    for one in advice:
        figures = one.row["figures"]
        axes.plot(
            *(figures[HIT_RATE] or 0.0, figures[TTFT]),
            **{"marker": "+", "markersize": 13, "color": INK, "linestyle": "none"},
        )
    _style(axes, "Pareto front", "token hit rate", "TTFT p90, ms")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    _scale_times(axes, [row["figures"][TTFT] for row in rows])
    note = "filled: on the front; +: recommended; the larger, the more snapshots"
    axes.text(0, -0.2, note, transform=axes.transAxes, fontsize=7, color=MUTED)
    if grid.given:
        legend = axes.legend(frameon=False, fontsize=7, labelcolor=MUTED)
        for handle in legend.legend_handles:
            handle.set_sizes([30])


def _scale_times(axes: Axes, times: Sequence[float]) -> None:
    if times and max(times) > 20 * min(times):
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _draw_map(
    axes: Axes,
    grid: Grid,
    rows: Sequence[Mapping[str, object]],
    advice: Sequence[Advice],
) -> None:
    """Hit rate in colour and time to first token in numbers, over the two options."""
    (down, downs), (across, acrosses) = grid.varied.items()
    hits = np.full((len(downs), len(acrosses)), np.nan)
    for row in rows:
        place = (
            downs.index(row["options"][down]),
            acrosses.index(row["options"][across]),
        )
        hits[place] = row["figures"][HIT_RATE] or 0.0
        text = f"{100 * hits[place]:.1f} %\n{row['figures'][TTFT]:,.0f} ms"
        taken = any(one.row["index"] == row["index"] for one in advice)
        axes.text(
            *(place[1], place[0], text),
            **{"ha": "center", "va": "center", "fontsize": 7, "color": INK},
            weight="bold" if taken else "normal",
        )
    axes.imshow(hits, aspect="auto", cmap="YlGnBu", alpha=0.4)
    title = "hit rate and TTFT p90"
    _style(axes, title, across.replace("_", "-"), down.replace("_", "-"))
    axes.grid(visible=False)
    axes.set_xticks(range(len(acrosses)), [value_text(v) for v in acrosses])
    axes.set_yticks(range(len(downs)), [value_text(v) for v in downs])


def _draw_memory(
    axes: Axes,
    grid: Grid,
    rows: Sequence[Mapping[str, object]],
    advice: Sequence[Advice],
) -> None:
    """Hit rate against what is kept, the best of all other options, and each."""
    del advice
    name = next(name for name in MEMORY if name in grid.varied)
    values = list(grid.varied[name])
    # Unlimited stands last, whatever its number.
    values.sort(key=lambda value: (value == 0, _amount(value)))
    others = [other for other in grid.given if other != name]
    lines: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        key = ", ".join(value_text(row["options"][other]) for other in others)
        at = values.index(row["options"][name])
        hits = row["figures"][HIT_RATE] or 0.0
        lines.setdefault(key, {}).setdefault(at, []).append(hits)
    for at, (key, points) in enumerate(lines.items()):
        colour = _COLOURS[at % len(_COLOURS)] if others else PREFILL
        places = sorted(points)
        for place in places:
            axes.plot(
                [place] * len(points[place]),
                points[place],
                **{"marker": "_", "linestyle": "none", "color": colour, "alpha": 0.5},
            )
        best = [max(points[place]) for place in places]
        marker = _MARKERS[at % len(_MARKERS)]
        axes.plot(
            *(places, best),
            **{"color": colour, "marker": marker, "markersize": 5},
            label=key or None,
        )
    shown = ["unlimited" if value == 0 else value_text(value) for value in values]
    _style(axes, "hits by memory", name.replace("_", "-"), "token hit rate")
    axes.set_xticks(range(len(values)), shown)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    if others:
        axes.legend(frameon=False, fontsize=7, labelcolor=MUTED)


def _amount(value: object) -> float:
    if isinstance(value, int | float):
        return float(value)
    from jaxsched.cache.sizing import parse_bytes

    return float(parse_bytes("memory", value))
