"""Measured kernel times: piecewise linear between points, and where to get them."""

import csv
import dataclasses
import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

US_PER_MS = 1000.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredTable:
    """Microseconds of a kernel by its load.

    Raises:
      ValueError: if the loads do not ascend, or a time is not above 0.
    """

    load: tuple[float, ...]
    time_us: tuple[float, ...]

    def __post_init__(self):
        if len(self.load) != len(self.time_us) or len(self.load) < 2:
            raise ValueError(
                "load and time_us need the same number of entries, at least 2, got "
                f"{len(self.load)} and {len(self.time_us)}"
            )
        for at, (one, other) in enumerate(
            zip(self.load, self.load[1:], strict=False), start=1
        ):
            if not other > one:
                raise ValueError(f"load[{at}] must be above {one}, got {other}")
        for at, time in enumerate(self.time_us):
            if not 0 < time < float("inf"):
                raise ValueError(f"time_us[{at}] must be above 0, got {time}")


def table_time(table: MeasuredTable, units, xp: ModuleType = np):
    """Microseconds at some load; beyond the last point the last slope goes on.

    Args:
      table: the measurements.
      units: the load, an array of floats or a number.
      xp: `numpy`, or `jax.numpy` inside `jit`.
    """
    load = xp.asarray(table.load, dtype=xp.asarray(units).dtype)
    time = xp.asarray(table.time_us, dtype=load.dtype)
    slope = (table.time_us[-1] - table.time_us[-2]) / (table.load[-1] - table.load[-2])
    beyond = xp.maximum(units - table.load[-1], 0.0) * max(slope, 0.0)
    return xp.interp(units, load, time) + beyond


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """Rows of a CSV file, plain or gzipped, as dicts."""
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def gemm_times(rows: Sequence[dict[str, str]]) -> np.ndarray:
    """Measured matrix products, f64[rows, 4]: m, n, k, microseconds."""
    found = [(row["m"], row["n"], row["k"], row["latency"]) for row in rows]
    return np.array(found, np.float64) * np.array([1, 1, 1, US_PER_MS])


def gemm_table(times: np.ndarray, inputs: int, outputs: int) -> MeasuredTable:
    """A matrix product of any shape, by its rows, from measured shapes.

    Between the measured widths the time is interpolated linearly, first along the
    outputs, then along the inputs; a shape outside of them is not guessed at.

    Args:
      times: see `gemm_times`.
      inputs, outputs: k and n of the product.

    Raises:
      ValueError: if the shape lies outside of what was measured.
    """
    _, widths_out, widths_in, _ = times.T
    for name, value, known in (
        ("inputs", inputs, widths_in),
        ("outputs", outputs, widths_out),
    ):
        if not known.min() <= value <= known.max():
            raise ValueError(
                f"{name} must lie within the measured [{known.min():.0f}, "
                f"{known.max():.0f}], got {value}"
            )
    curves = {}
    for k in _neighbours(widths_in, inputs):
        for n in _neighbours(widths_out[widths_in == k], outputs):
            mine = times[(widths_in == k) & (widths_out == n)]
            curves[k, n] = mine[np.argsort(mine[:, 0])][:, [0, 3]]
    rows = sorted(set.intersection(*(set(curve[:, 0]) for curve in curves.values())))
    if len(rows) < 2:
        raise ValueError(f"no common rows were measured around {inputs}x{outputs}")
    by_inputs: dict[float, np.ndarray] = {}
    for k in sorted({k for k, _ in curves}):
        near = sorted(n for one, n in curves if one == k)
        stack = [np.interp(rows, *curves[k, n].T) for n in near]
        by_inputs[k] = _between(near, stack, outputs)
    known = sorted(by_inputs)
    time = _between(known, [by_inputs[k] for k in known], inputs)
    return MeasuredTable(load=tuple(map(float, rows)), time_us=tuple(map(float, time)))


def _neighbours(known: np.ndarray, value: float) -> Iterator[float]:
    """The measured widths on both sides of a width, or the one that it is."""
    below, above = known[known <= value], known[known >= value]
    sides = {side for side in (below.max(initial=-1), above.min(initial=1e18))}
    yield from (side for side in sorted(sides) if 0 < side < 1e18)


def _between(known: Sequence[float], values: Sequence[np.ndarray], at: float):
    if len(known) == 1:
        return values[0]
    share = (at - known[0]) / (known[1] - known[0])
    return values[0] * (1 - share) + values[1] * share
