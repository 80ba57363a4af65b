"""The rows of a sweep as a readable table, and what to set in words."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxsched.simulation.sweep_front import Advice
from jaxsched.simulation.sweep_grid import Grid, describe, value_text

_MOST_ROWS = 48
_WIDTH = 120
_FIGURES = (
    ("hits", "token_hit_rate", "{:.1%}"),
    ("TTFT p50", "ttft_ms_p50", "{:,.0f}"),
    ("p90", "ttft_ms_p90", "{:,.0f}"),
    ("TPOT p90", "tpot_ms_p90", "{:,.1f}"),
    ("snapshots", "num_snapshots_filed", "{:,}"),
    ("evicted", "num_evicted_snapshots", "{:,}"),
    ("req/s", "requests_per_s", "{:,.2f}"),
)


def print_sweep(
    name: str,
    grid: Grid,
    rows: Sequence[Mapping[str, object]],
    advice: Sequence[Advice],
) -> None:
    """Prints the table, or of a large sweep its fronts, and the recommendations.

    Args:
      name: of the workload.
      grid: of the sweep.
      rows: of the sweep, in order.
      advice: see `advise`.
    """
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    front = {index for one in advice for index in one.front}
    taken = {one.row["index"] for one in advice}
    shown = [row for row in rows if "error" not in row]
    if len(shown) > _MOST_ROWS:
        shown = [row for row in shown if row["index"] in front]
    # A file name may hold what rich takes for markup.
    title = Text(f"{name}: {len(shown)} of {len(rows)} settings; times in ms")
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for option in grid.varied:
        table.add_column(
            option.replace("_", "-").removeprefix("snapshot-"),
            justify="right",
            no_wrap=True,
        )
    for header, _, _ in _FIGURES:
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in shown:
        index = row["index"]
        mark = ("*" if index in front else "") + (
            " take this" if index in taken else ""
        )
        style = "bold" if index in taken else "" if index in front else "dim"
        options = (value_text(row["options"][option]) for option in grid.varied)
        table.add_row(*options, *_cells(row["figures"]), mark, style=style)
    console.print(table)
    for one in advice:
        given = f"{describe(one.given)}: " if one.given else ""
        console.print(Text(f"{given}take {one.reason}"))
    for row in rows:
        if "error" in row:
            console.print(Text(f"{describe(row['options'])}: {row['error']}"))


def _cells(figures: Mapping[str, object]) -> list[str]:
    return [
        "-" if figures[key] is None else form.format(figures[key])
        for _, key, form in _FIGURES
    ]
