"""The figures of a replay as a readable table."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxsched.simulation.replay_config import ReplayConfig

_SPREADS = (
    ("time to first token", "ttft_ms"),
    ("end to end", "e2e_ms"),
    ("waiting to be admitted", "queue_ms"),
    ("per output token", "tpot_ms"),
)
_PARTS = ("mean", "p50", "p90", "p99")


def print_metrics(found: dict, config: ReplayConfig) -> None:
    """Prints the dict of `simulation.metrics.metrics`."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(_figures(found, config))
    console.print(_times(found))
    notes = (
        ("num_dropped", "rows without tokens were left out"),
        ("num_refused", "prompts are longer than a step and were refused: chunk them"),
    )
    for key, text in notes:
        if found[key]:
            console.print(f"{found[key]} {text}")


def _figures(found: dict, config: ReplayConfig) -> Table:
    # A file name may hold what rich takes for markup.
    title = Text(f"{found['workload']} ({found['form']})")
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    ends = f"{found['num_finished']} of {found['num_requests']}"
    if found["num_cancelled"]:
        ends += f", {found['num_cancelled']} cancelled"
    table.add_row("requests finished", ends)
    table.add_row("simulated time", f"{found['duration_s']:,.1f} s")
    table.add_row("steps", f"{found['num_steps']:,}")
    table.add_row("prefill chunks", f"{found['num_chunks']:,}")
    table.add_row("scheduled tokens", f"{found['num_scheduled_tokens']:,}")
    table.add_row("  of prompts", f"{found['num_prefill_tokens']:,}")
    table.add_row("  of decodes, drafts included", f"{found['num_decode_tokens']:,}")
    landed = f"{found['num_snapshots_landed']} of {found['num_snapshots_due']}"
    table.add_row("snapshots landed of those due", landed)
    table.add_row("requests a second", _number(found["requests_per_s"], 2))
    table.add_row("prompt tokens a second", _number(found["prompt_tokens_per_s"], 0))
    table.add_row("output tokens a second", _number(found["output_tokens_per_s"], 0))
    budget = config.max_num_batched_tokens
    if budget:
        table.add_row(
            f"use of the {budget:,}-token budget", _share(found["budget_use"])
        )
    table.add_row("time in steps", _share(found["busy"]))
    table.add_row("rows a step", _number(found["seqs_per_step"], 1))
    table.add_row("most requests at a time", f"{found['max_running']:,}")
    return table


def _times(found: dict) -> Table:
    table = Table(title="milliseconds", title_justify="left")
    table.add_column("time")
    for part in _PARTS:
        table.add_column(part, justify="right")
    for title, name in _SPREADS:
        values = (_number(found[f"{name}_{part}"], 1) for part in _PARTS)
        table.add_row(title, *values)
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
