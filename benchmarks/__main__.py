"""Runs every benchmark and writes one file of figures: `python -m benchmarks OUT`."""

import argparse
import json
from pathlib import Path

from benchmarks import harness, planning

_BENCHMARKS = {"planning": planning.main}


def main() -> None:
    """Runs them one after the other; a later one never disturbs an earlier one."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("out", nargs="?", help="write all figures to this JSON file")
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    args = parser.parse_args()
    print(harness.hardware())
    results = {"hardware": harness.hardware()}
    for name, benchmark in _BENCHMARKS.items():
        results[name] = benchmark(args)
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
