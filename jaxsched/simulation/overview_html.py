"""A replay as one HTML file that needs nothing else: pictures and tables are in it."""

import base64
import dataclasses
import html
import io
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.figure import Figure

from jaxsched.simulation.goodput import goodput, queueing
from jaxsched.simulation.metrics import request_report
from jaxsched.simulation.overview import draw_overview
from jaxsched.simulation.overview_series import series
from jaxsched.simulation.overview_tiles import headline, tiles
from jaxsched.simulation.replay import Replay
from jaxsched.simulation.timeline import draw_timeline

MAX_LISTED = 50
"""Requests in the table of the slowest ones."""

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1b1f24; background: #fff;
  margin: 0 auto; max-width: 1240px; padding: 24px; }
h1 { font-size: 22px; margin: 0 0 4px; }
h2 { font-size: 16px; margin: 32px 0 8px; }
p.sub { color: #6b7280; margin: 0 0 16px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 0 0 20px; }
.tile { border: 1px solid #e5e7eb; border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 20px; }
.tile span { color: #6b7280; font-size: 12px; }
img { max-width: 100%; height: auto; }
.columns { display: flex; flex-wrap: wrap; gap: 32px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 14px 3px 0; border-bottom: 1px solid #eef0f2; text-align: left; }
td.n, th.n { text-align: right; }
.scroll { overflow-x: auto; }
footer { color: #6b7280; margin-top: 32px; font-size: 12px; }
"""
_TIMES = (
    ("time to first token", "ttft_ms"),
    ("end to end", "e2e_ms"),
    ("waiting to be admitted", "queue_ms"),
    ("per output token", "tpot_ms"),
)
_PARTS = ("mean", "p50", "p90", "p99")
_COLUMNS = (
    ("request", "id"),
    ("prompt tokens", "num_prompt_tokens"),
    ("cached", "num_cached_tokens"),
    ("output tokens", "num_output_tokens"),
    ("arrival ms", "arrival_ms"),
    ("first token ms", "ttft_ms"),
    ("end to end ms", "e2e_ms"),
    ("preempted", "num_preemptions"),
    ("ended", "finish_reason"),
)


def overview_html(run: Replay, limits: dict[str, float] | None = None) -> str:
    """The page, as text to be written in UTF-8.

    Tiles with the main figures, the overview and the timeline as pictures, tables of
    times, of the queue, of all figures, of the slowest requests and of the settings.

    Args:
      run: what happened.
      limits: those of `goodput`; without any there is no such table.
    """
    found, limits = series(run), limits or {}
    title, subtitle = headline(run)
    figures = found.figures
    shown = (
        f'<div class="tile"><b>{_text(one.value)}</b>'
        f"<span>{_text(one.label)}</span></div>"
        for one in tiles(run, found, limits)
    )
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
        f'<h1>{_text(title)}</h1><p class="sub">{_text(subtitle)}</p>',
        f'<div class="tiles">{"".join(shown)}</div>',
        _picture(draw_overview(run, limits), "the run in six panels"),
        '<div class="columns">',
        _section("Times in milliseconds", _times_table(figures)),
        _section("Queue", _pairs_table(queueing(run))),
    ]
    if limits:
        kept = goodput(run, **limits)
        flat = {f"limit {name}": limit for name, limit in kept.pop("limits").items()}
        late = kept.pop("num_too_late").items()
        flat |= kept | {f"too late: {name}": number for name, number in late}
        parts.append(_section("Within limits", _pairs_table(flat)))
    parts += [
        "</div>",
        _section("Timeline", _picture(draw_timeline(run), "requests over time")),
        _section("Slowest to their first token", _requests_table(run)),
        '<div class="columns">',
        _section("All figures", _pairs_table(figures)),
        _section("Settings", _pairs_table(dataclasses.asdict(run.config))),
        "</div><footer>Made by jaxsched on a simulated clock.</footer></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _section(title: str, content: str) -> str:
    return f'<section><h2>{_text(title)}</h2><div class="scroll">{content}</div>' + (
        "</section>"
    )


def _picture(figure: Figure, what: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img alt="{_text(what)}" src="data:image/png;base64,{data}">'


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    def cell(tag: str, at: int, value: object) -> str:
        right = ' class="n"' if at else ""
        return f"<{tag}{right}>{_text(_shown(value))}</{tag}>"

    lines = []
    if head:
        names = "".join(cell("th", at, name) for at, name in enumerate(head))
        lines.append(f"<thead><tr>{names}</tr></thead>")
    lines.append("<tbody>")
    for row in rows:
        cells = "".join(cell("td", at, value) for at, value in enumerate(row))
        lines.append(f"<tr>{cells}</tr>")
    return "<table>" + "".join(lines) + "</tbody></table>"


def _times_table(figures: dict) -> str:
    rows = (
        [name, *(figures[f"{key}_{part}"] for part in _PARTS)] for name, key in _TIMES
    )
    return _table(["", *_PARTS], rows)


def _pairs_table(values: dict) -> str:
    rows = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += [[f"{name}: {key}", one] for key, one in value.items()]
        else:
            rows.append([name, value])
    return _table([], rows)


def _requests_table(run: Replay) -> str:
    lines = list(request_report(run))
    times = np.array(
        [np.nan if one["ttft_ms"] is None else one["ttft_ms"] for one in lines]
    )
    order = np.argsort(-times, kind="stable")  # those without a token come last
    chosen = order[~np.isnan(times[order])][:MAX_LISTED]
    rows = [[lines[at].get(key) for _, key in _COLUMNS] for at in chosen.tolist()]
    return _table([name for name, _ in _COLUMNS], rows)


def _shown(value: object) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1 else f"{value:,.1f}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _text(value: object) -> str:
    return html.escape(str(value))
