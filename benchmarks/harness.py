"""What all benchmarks share: interleaved rounds, a named baseline, one result form."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table


def hardware() -> str:
    """The machine and the versions that a figure belongs to."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, jax {jax.__version__} on "
        f"{jax.default_backend()}, numpy {np.__version__}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )


def measure(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int, seconds: float = 4.0
) -> dict[str, dict[str, float]]:
    """Times callables in interleaved rounds, so that they share the machine's moods.

    Each is called twice beforehand. Rounds end early once `seconds` are spent, but
    not before five.

    Returns:
      For each name `min_us` and `median_us`.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        jax.block_until_ready(call())
        jax.block_until_ready(call())
    end = time.perf_counter() + seconds
    for done in range(rounds):
        if done >= 5 and time.perf_counter() > end:
            break
        for name, call in candidates.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append((time.perf_counter() - start) * 1e6)
    return {
        name: {"min_us": min(taken), "median_us": statistics.median(taken)}
        for name, taken in times.items()
    }


def ratio(figures: Mapping, name: str, baseline: str) -> float:
    """How many times faster than the baseline, by the minima.

    Other jobs only ever add time, and they add more to what several threads share.
    """
    return figures[baseline]["min_us"] / figures[name]["min_us"]


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """A table with the names on the left and figures on the right."""
    table = Table(title=title, title_justify="left")
    for at, name in enumerate(header):
        table.add_column(name, justify="right" if at else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=132).print(table)


def run(description: str, main: Callable[[argparse.Namespace], dict]) -> None:
    """Command line of one benchmark: prints its tables, writes `--json FILE`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that it runs"
    )
    args = parser.parse_args()
    print(hardware())
    results = {"hardware": hardware(), **main(args)}
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
