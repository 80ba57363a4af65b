"""`python -m jaxsched export`: planners compiled ahead of time, as one file.

The file holds a program for each size of table, for CPUs and NVIDIA GPUs alike;
`jaxsched.scheduling.exporting.ExportedPlanner` loads it and plans without tracing.
"""

import argparse
import json
from pathlib import Path

from jaxsched.cli.reading import InputError
from jaxsched.cli.writing import check_target, write_whole
from jaxsched.core.config import ChunkingPolicy, Rules, SchedulerConfig, SnapshotMode

_DEFAULTS = SchedulerConfig()


def add_parser(subparsers) -> None:
    """Adds the command to the program's argument parser."""
    parser = subparsers.add_parser(
        "export",
        help="write compiled planners into a file",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="OUT", help="the file to write")
    parser.add_argument(
        "--rows",
        type=_sizes,
        default=(64, 256, 1024),
        metavar="N,N",
        help="sizes of request tables, a program each (64,256,1024)",
    )
    for name, kind in (
        ("rules", Rules),
        ("chunking_policy", ChunkingPolicy),
        ("snapshot_mode", SnapshotMode),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            choices=[str(value) for value in kind],
            default=str(getattr(_DEFAULTS, name)),
        )
    for name, default, text in (
        ("--max-emit-points", _DEFAULTS.max_emit_points, "of one chunk, emit mode"),
        ("--num-points", 8, "columns of published points"),
        ("--num-requested-points", 1, "columns of points that callers choose"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{text} ({default})")
    for name in ("encoder_decoder", "group_by_lora"):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            action=argparse.BooleanOptionalAction,
            default=getattr(_DEFAULTS, name),
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be integers with commas between them, got {text!r}"
        ) from None


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    from jaxsched.scheduling.exporting import PLATFORMS, export_planner

    check_target(args.file)
    try:
        config = SchedulerConfig(
            rules=args.rules,
            chunking_policy=args.chunking_policy,
            snapshot_mode=args.snapshot_mode,
            max_emit_points=args.max_emit_points,
            encoder_decoder=args.encoder_decoder,
            group_by_lora=args.group_by_lora,
        )
        write_whole(
            args.file,
            lambda path: export_planner(
                path,
                config,
                args.rows,
                num_points=args.num_points,
                num_requested_points=args.num_requested_points,
            ),
        )
    except ValueError as wrong:
        raise InputError(str(wrong)) from wrong
    size = Path(args.file).stat().st_size
    if args.json:
        figures = {"file": args.file, "rows": sorted(args.rows), "bytes": size}
        print(json.dumps(figures | {"platforms": list(PLATFORMS)}))
    else:
        rows = ", ".join(f"{count:,}" for count in sorted(args.rows))
        print(f"{args.file}: tables of {rows} rows, {size:,} bytes")
    return 0
