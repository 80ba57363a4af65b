"""Which settings of a sweep are worth having, and which one to take, with the reason.

A setting is on the Pareto front if no other one has as many hits, as short a time to
first token and as few snapshots (or bytes), and is better in one of the three.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxsched.simulation.sweep_grid import Grid, value_text

HIT_RATE, TTFT, SNAPSHOTS = "token_hit_rate", "ttft_ms_p90", "num_snapshots_filed"

NEAR_TTFT = 1.05
"""A time to first token up to so many times the best one is as good."""

NEAR_HITS = 0.02
"""Hit rates that are so much apart are as good."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """What to set where there is what is given.

    Attributes:
      given: the values of the options that say what there is.
      row: the recommended row.
      front: indices of the rows on the Pareto front, by falling hit rate.
      reason: in words.
    """

    given: Mapping[str, object]
    row: Mapping[str, object]
    front: tuple[int, ...]
    reason: str


def advise(grid: Grid, rows: Sequence[Mapping[str, object]]) -> list[Advice]:
    """A recommendation for every combination of the given options.

    Args:
      grid: of the sweep.
      rows: with `index`, `options` and `figures`; those without figures are left out.
    """
    found: dict[tuple, list] = {}
    for row in rows:
        if row.get("figures") and row["figures"][TTFT] is not None:
            key = tuple(value_text(row["options"][name]) for name in grid.given)
            found.setdefault(key, []).append(row)
    return [_advise(grid, members) for members in found.values()]


def _goals(row: Mapping[str, object]) -> tuple[float, float, float]:
    """The three figures of a row, the smaller the better."""
    figures = row["figures"]
    return (-(figures[HIT_RATE] or 0.0), figures[TTFT], figures[SNAPSHOTS])


def pareto_front(rows: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """The rows that no other one beats, by falling hit rate."""
    goals = [_goals(row) for row in rows]

    def is_beaten(mine: tuple) -> bool:
        return any(
            other != mine and all(a <= b for a, b in zip(other, mine, strict=True))
            for other in goals
        )

    kept = [row for row, mine in zip(rows, goals, strict=True) if not is_beaten(mine)]
    return sorted(kept, key=_goals)


def _advise(grid: Grid, rows: list[Mapping[str, object]]) -> Advice:
    front = pareto_front(rows)
    fastest = min(rows, key=lambda row: row["figures"][TTFT])
    quick = [
        row
        for row in front
        if row["figures"][TTFT] <= NEAR_TTFT * fastest["figures"][TTFT]
    ]
    most = max(row["figures"][HIT_RATE] or 0.0 for row in quick)
    near = [row for row in quick if (row["figures"][HIT_RATE] or 0) >= most - NEAR_HITS]
    best = min(near, key=lambda row: (row["figures"][SNAPSHOTS], *_goals(row)))
    return Advice(
        given={name: best["options"][name] for name in grid.given},
        row=best,
        front=tuple(row["index"] for row in front),
        reason=_reason(grid, rows, best),
    )


def _reason(
    grid: Grid, rows: list[Mapping[str, object]], best: Mapping[str, object]
) -> str:
    """What the recommended setting gives up and gains against the extreme ones."""
    if len(rows) == 1:
        return "the only setting"
    sentences = []
    by_hits = min(rows, key=_goals)
    fewest = min(rows, key=lambda row: (row["figures"][SNAPSHOTS], *_goals(row)))
    slowest = max(rows, key=lambda row: row["figures"][TTFT])
    for other, name in (
        (by_hits, "most hits"),
        (fewest, "fewest snapshots"),
        (slowest, "slowest"),
    ):
        if other["index"] == best["index"]:
            continue
        if name == "slowest" and sentences:
            continue
        sentences.append(f"{_versus(best, other)} than {_named(grid, other)} ({name})")
    start = _named(grid, best)
    return f"{start}: " + "; ".join(sentences) if sentences else start


def _named(grid: Grid, row: Mapping[str, object]) -> str:
    names = grid.chosen or list(grid.varied)
    parts = (
        f"{name.replace('_', '-').removeprefix('snapshot-')} "
        f"{value_text(row['options'][name])}"
        for name in names
    )
    return ", ".join(parts)


def _versus(best: Mapping[str, object], other: Mapping[str, object]) -> str:
    mine, theirs = best["figures"], other["figures"]
    points = 100 * ((mine[HIT_RATE] or 0) - (theirs[HIT_RATE] or 0))
    hits = f"{abs(points):.1f} points {'more' if points >= 0 else 'fewer'} hits"
    return ", ".join(
        (hits, _times(mine[SNAPSHOTS], theirs[SNAPSHOTS]), _percent(mine, theirs))
    )


def _times(mine: float, theirs: float) -> str:
    if mine == theirs:
        return "as many snapshots"
    word = "fewer" if mine < theirs else "more"
    low, high = sorted((mine, theirs))
    if not low:
        return f"{high - low:,} snapshots {word}"
    if high < 1.1 * low:
        return f"{100 * (high / low - 1):.0f} % {word} snapshots"
    return f"{high / low:.3g}x {word} snapshots"


def _percent(mine: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    change = 100 * (mine[TTFT] / theirs[TTFT] - 1) if theirs[TTFT] else 0.0
    return f"TTFT p90 {change:+.0f} %"
