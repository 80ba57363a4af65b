"""One page on a replay: load over time, how long requests took, what the cache gave.

matplotlib is imported here; import this module only to draw.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from jaxsched.simulation.overview_series import Series, series
from jaxsched.simulation.overview_tiles import Tile, headline, tiles
from jaxsched.simulation.replay import Replay

INK, MUTED, GRID = "#1b1f24", "#6b7280", "#e5e7eb"
PREFILL, DECODE, WAITING = "#2166ac", "#8cc98a", "#c9ccd1"
CACHED, ADMITTED, ACCENT = "#f4a259", "#9bbfe0", "#b2182b"
_DPI = 130
_MARKS = ((50, "p50"), (90, "p90"), (99, "p99"))


def draw_overview(run: Replay, limits: dict[str, float] | None = None) -> Figure:
    """Draws the page; save it with `figure.savefig`.

    Args:
      run: what happened.
      limits: those of `goodput`, for one more tile and lines in the distributions.
    """
    found, limits = series(run), limits or {}
    with_hits = found.has_hits
    figure = Figure(figsize=(15.0, 10.4), dpi=_DPI)
    FigureCanvasAgg(figure)
    grid = GridSpec(
        *(3, 6),
        figure=figure,
        height_ratios=(1.0, 1.0, 1.15),
        **{"left": 0.06, "right": 0.985, "bottom": 0.06, "top": 0.80},
        **{"hspace": 0.42, "wspace": 0.95},
    )
    _draw_head(figure, run, tiles(run, found, limits))
    top = figure.add_subplot(grid[0, :3])
    _draw_tokens(top, found, with_hits)
    _draw_requests(figure.add_subplot(grid[0, 3:], sharex=top), found)
    _draw_shares(figure.add_subplot(grid[1, :3], sharex=top), found, with_hits)
    _draw_times(figure.add_subplot(grid[1, 3:], sharex=top), run, found)
    ttft, tpot = (figure.add_subplot(grid[2, at : at + 2]) for at in (0, 2))
    _draw_spread(ttft, found.ttft_ms, "time to first token", limits.get("ttft_ms"))
    _draw_spread(tpot, found.tpot_ms, "time per output token", limits.get("tpot_ms"))
    _draw_scatter(figure.add_subplot(grid[2, 4:]), found, with_hits)
    top.set_xlim(found.edges[0], found.edges[-1])
    return figure


def _draw_head(figure: Figure, run: Replay, shown: list[Tile]) -> None:
    title, subtitle = headline(run)
    figure.text(0.02, 0.965, title, fontsize=15, color=INK, weight="bold")
    figure.text(0.02, 0.938, subtitle, fontsize=9.5, color=MUTED)
    width = 0.965 / len(shown)
    for at, tile in enumerate(shown):
        left = 0.02 + at * width
        figure.text(left, 0.885, tile.value, fontsize=17, color=INK, weight="bold")
        figure.text(left, 0.876, tile.label, fontsize=8.5, color=MUTED, va="top")


def _title(axes: Axes, text: str, unit: str = "") -> None:
    axes.set_title(text, loc="left", fontsize=10, color=INK, weight="bold")
    if unit:
        axes.set_ylabel(unit, fontsize=8, color=MUTED)
    axes.tick_params(labelsize=8, colors=MUTED, length=2)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)


def _legend(axes: Axes, columns: int) -> None:
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=8,
        handlelength=1.0,
        markerscale=1.6,
        columnspacing=1.0,
        borderaxespad=0.1,
        labelcolor=MUTED,
    )


def _thousands(axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _logarithmic(axis) -> None:
    """A logarithmic scale whose numbers are written out."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    # Over several decades only powers of ten have room.
    steps = (1.0,) if high > 2000 * low else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())


def _draw_tokens(axes: Axes, found: Series, with_hits: bool) -> None:
    parts = [found.decode_per_s, found.prefill_per_s]
    names, colours = ["decode", "prefill"], [DECODE, PREFILL]
    if with_hits:
        parts.append(found.cached_per_s)
        names.append("from the cache")
        colours.append(CACHED)
    axes.stackplot(
        found.middles, *parts, labels=names, colors=colours, linewidth=0, step="mid"
    )
    _title(axes, "Tokens", "tokens a second")
    _legend(axes, len(names))
    axes.set_ylim(0, None)
    _thousands(axes.yaxis)


def _draw_requests(axes: Axes, found: Series) -> None:
    axes.stackplot(
        found.middles,
        *(found.decoding, found.prefilling, found.waiting),
        labels=("decoding", "in prefill", "waiting for admission"),
        colors=(DECODE, ADMITTED, WAITING),
        linewidth=0,
        step="mid",
    )
    _title(axes, "Requests and queue", "requests")
    _legend(axes, 3)
    axes.set_ylim(0, None)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def _draw_shares(axes: Axes, found: Series, with_hits: bool) -> None:
    has_budget = bool(np.any(~np.isnan(found.budget_use)))
    if has_budget:
        axes.plot(
            found.middles,
            100 * found.budget_use,
            color=PREFILL,
            linewidth=1.1,
            drawstyle="steps-mid",
            label="use of the token budget",
        )
    if with_hits:
        axes.plot(
            found.middles,
            100 * found.hit_share,
            color=CACHED,
            linewidth=1.1,
            marker=".",
            markersize=2.5,
            label="prompt tokens from the cache",
        )
    text = "Use of the budget and cache hits" if with_hits else "Use of the budget"
    _title(axes, text, "per cent")
    axes.set_ylim(0, 105)
    axes.set_xlabel("seconds since the first arrival", fontsize=8, color=MUTED)
    if has_budget or with_hits:
        _legend(axes, 2)
    else:
        _say(axes, "no token budget was set")


def _draw_times(axes: Axes, run: Replay, found: Series) -> None:
    _title(axes, "Time to first token, by arrival", "ms")
    axes.set_xlabel("seconds since the first arrival", fontsize=8, color=MUTED)
    known = ~np.isnan(found.ttft_ms)
    if not known.any():
        _say(axes, "no request got a token")
        return
    axes.plot(
        run.arrival[known] / 1e12,
        np.maximum(found.ttft_ms[known], 1e-3),
        linestyle="",
        marker=".",
        markersize=3.5,
        markeredgewidth=0,
        alpha=_opacity(known.sum()),
        color=PREFILL,
        rasterized=True,
    )
    _logarithmic(axes.yaxis)


def _draw_spread(
    axes: Axes, values: np.ndarray, name: str, limit: float | None
) -> None:
    """A histogram over a logarithmic axis, with percentiles."""
    _title(axes, name.capitalize(), "requests")
    axes.set_xlabel("ms", fontsize=8, color=MUTED)
    values = values[~np.isnan(values)]
    if not len(values):
        _say(axes, "none")
        return
    values = np.maximum(values, 1e-3)
    low, high = values.min(), values.max()
    if high < low * 1.02:  # all alike: a bar of some width in the middle
        low, high = low / 1.2, high * 1.2
    bins = np.geomspace(low, high, min(50, 8 + int(len(values) ** 0.5)))
    axes.hist(values, bins=bins, color=ADMITTED, edgecolor="white", linewidth=0.4)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.22)
    for at, (percentile, label) in enumerate(_MARKS):
        value = float(np.percentile(values, percentile))
        axes.axvline(value, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
        axes.annotate(
            f"{label} {_short(value)}",
            (value, 0.985 - 0.075 * at),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=7.5,
            color=INK,
            va="top",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8},
        )
    if limit is not None:
        _draw_limit(axes, limit, low, high)
    _logarithmic(axes.xaxis)


def _draw_limit(axes: Axes, limit: float, low: float, high: float) -> None:
    """A line where the limit is; only a word where it lies far from all values."""
    if low / 3 <= limit <= 3 * high:
        axes.axvline(limit, color=ACCENT, linewidth=1.4)
        place, turn, text = (limit, 0.5), 90, f"limit {_short(limit)}"
        coordinates = ("data", "axes fraction")
    else:
        arrow = "\u2192" if limit > high else "\u2190"
        place, turn = (0.97, 0.5), 0
        text, coordinates = f"limit {_short(limit)} {arrow}", "axes fraction"
    axes.annotate(
        text,
        place,
        xycoords=coordinates,
        xytext=(-3, 0),
        textcoords="offset points",
        rotation=turn,
        fontsize=7.5,
        color=ACCENT,
        ha="right",
        va="center",
    )


def _draw_scatter(axes: Axes, found: Series, with_hits: bool) -> None:
    _title(axes, "First token by prompt", "ms")
    axes.set_xlabel("prompt tokens", fontsize=8, color=MUTED)
    known = ~np.isnan(found.ttft_ms)
    if not known.any():
        _say(axes, "no request got a token")
        return
    hit = found.cached_tokens > 0
    groups = [(known & ~hit, PREFILL, "computed")]
    if with_hits:
        groups.append((known & hit, CACHED, "in part cached"))
    for mine, colour, name in groups:
        axes.plot(
            found.prompt_tokens[mine],
            np.maximum(found.ttft_ms[mine], 1e-3),
            linestyle="",
            marker=".",
            markersize=4,
            markeredgewidth=0,
            alpha=_opacity(known.sum()),
            color=colour,
            label=name,
            rasterized=True,
        )
    _logarithmic(axes.xaxis)
    _logarithmic(axes.yaxis)
    if with_hits:
        _legend(axes, 2)


def _opacity(number: int) -> float:
    return float(np.clip(1.2 - 0.2 * np.log10(max(number, 1)), 0.3, 0.9))


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=MUTED)


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:,.0f} s"
    return f"{value:,.0f} ms" if value >= 10 else f"{value:,.1f} ms"
