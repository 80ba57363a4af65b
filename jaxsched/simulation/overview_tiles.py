"""The few figures at the top of an overview, and its words."""

from typing import NamedTuple

import numpy as np

from jaxsched.simulation.goodput import goodput
from jaxsched.simulation.overview_series import Series
from jaxsched.simulation.replay import Replay


class Tile(NamedTuple):
    """A figure and what it is."""

    value: str
    label: str


def headline(run: Replay) -> tuple[str, str]:
    """Title and subtitle of a page."""
    config = run.config
    budget = config.max_num_batched_tokens
    shown = f"{budget:,} tokens a step" if budget else "no token budget"
    interval = config.snapshot_interval
    snapshots = f"a snapshot every {interval:,} tokens" if interval else "no grid"
    if not config.prefix_caching:
        snapshots = "no prefix caching"
    name = run.workload.name.rsplit("/", 1)[-1]
    return f"{name}: {len(run.arrival):,} requests", (
        f"{config.rules}, {config.chunking_policy}, {shown}, at most "
        f"{config.max_num_seqs} requests at a time, blocks of {config.block_size}, "
        f"{snapshots} ({config.snapshot_mode})"
    )


def tiles(run: Replay, found: Series, limits: dict[str, float]) -> list[Tile]:
    """The figures at the top."""
    figures = found.figures
    shown = [
        Tile(f"{figures['num_finished']:,}", "requests\nfinished"),
        Tile(_number(figures["requests_per_s"], 2), "requests\na second"),
        Tile(_number(figures["output_tokens_per_s"], 0), "output tokens\na second"),
        Tile(_pair(figures, "ttft_ms"), "ms to first token,\np50 | p90"),
        Tile(_pair(figures, "tpot_ms"), "ms per output token,\np50 | p90"),
    ]
    if found.has_hits:
        entered = ~np.isnan(found.ttft_ms)
        prompts = int(found.prompt_tokens[entered].sum())
        share = found.cached_tokens[entered].sum() / prompts if prompts else 0.0
        shown.append(Tile(f"{100 * share:.1f} %", "of prompt tokens\nfrom the cache"))
    if figures["budget_use"] is not None:
        shown.append(
            Tile(f"{100 * figures['budget_use']:.1f} %", "of the token\nbudget used")
        )
    if limits:
        good = goodput(run, **limits)
        shown.append(Tile(f"{100 * good['good_share']:.1f} %", _kept(limits)))
    return shown


def _kept(limits: dict[str, float]) -> str:
    names = {"ttft_ms": "first", "tpot_ms": "each", "e2e_ms": "whole"}
    parts = [f"{names[name]} {limit:g}" for name, limit in limits.items() if limit]
    return f"within limits,\nms: {', '.join(parts)}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _pair(figures: dict, name: str) -> str:
    digits = 0 if (figures[f"{name}_p50"] or 0) >= 100 else 1
    parts = (_number(figures[f"{name}_{part}"], digits) for part in ("p50", "p90"))
    return " | ".join(parts)
