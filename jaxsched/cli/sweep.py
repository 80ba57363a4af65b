"""`python -m jaxsched sweep`: one workload under every combination of options.

Every option of `replay` takes a list: with --snapshot-interval 512,2048 and
--kv-blocks 4096,8192 four configurations run. Options that are lists themselves have
semicolons between their alternatives (--snapshot-from-end "0;0,64;none"); switches
take on,off.

A setting is marked * if no other one has as many hits, as short a time to first token
and as few snapshots. The recommended one has the fewest snapshots among those of them
whose time to first token (p90) is within 5 % of the shortest and whose hit rate is
within 2 points of the highest that is left; where there are several models, memories or
rates, there is one for each.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxsched.cli import replay_options, sweep_options
from jaxsched.cli.reading import InputError
from jaxsched.cli.writing import check_target, write_whole

_PICTURES = (".png", ".pdf", ".svg")


def add_parser(subparsers) -> None:
    """Adds the command to the program's argument parser."""
    parser = subparsers.add_parser(
        "sweep",
        help="replay a workload under many configurations and say what to set",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    replay_options.add_workload_options(parser)
    replay_options.add_config_options(parser, sweep_options.ListOptions)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument(
        "--plot", metavar="OUT.png", help="fronts and maps (png, pdf, svg)"
    )
    output.add_argument(
        "--results",
        metavar="FILE.jsonl",
        help="write each configuration as it is ready; a sweep that was killed goes on "
        "from there",
    )
    output.add_argument(
        "--workers", type=_positive, help="replays at a time; default one a core"
    )
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    for path in (args.plot, args.results):
        check_target(path)
    if args.plot and Path(args.plot).suffix.lower() not in _PICTURES:
        raise InputError(f"{args.plot}: --plot writes {', '.join(_PICTURES)}")
    # Only now: reading the options must not wait for jax.
    from jaxsched.simulation import sweep_front, sweep_grid

    options = {
        name: getattr(args, name) for name in replay_options.config_names(vars(args))
    }
    try:
        grid = sweep_grid.split_options(options)
    except ValueError as wrong:
        raise InputError(str(wrong)) from wrong
    configs = _configurations(grid)
    workload = replay_options.workload_of(args)
    rows = _rows(args, workload, grid, configs)
    advice = sweep_front.advise(grid, rows)
    if args.plot:
        from jaxsched.simulation import sweep_plot

        figure = sweep_plot.draw_sweep(grid, rows, advice, title=workload.name)
        form = Path(args.plot).suffix.lower().removeprefix(".")
        write_whole(args.plot, lambda path: figure.savefig(path, format=form))
    if args.json:
        print(json.dumps(_report(workload, grid, rows, advice)))
    else:
        from jaxsched.cli import sweep_table

        sweep_table.print_sweep(workload.name, grid, rows, advice)
    return 0


def _configurations(grid) -> list:
    """The configuration of every point; a bad one is named."""
    from jaxsched.simulation.sweep_grid import describe

    found = []
    for point in grid.points:
        try:
            found.append(replay_options.config_of({**grid.fixed, **point}))
        except InputError as wrong:
            where = f"{describe(point)}: " if point else ""
            raise InputError(f"{where}{wrong}") from wrong
    return found


def _rows(args: argparse.Namespace, workload, grid, configs: list) -> list[dict]:
    """A row for every configuration, in order; those in the results file are kept."""
    from jaxsched.simulation import replay, sweep, sweep_results

    rows: dict[int, dict] = {}
    with contextlib.ExitStack() as stack:
        file = None
        if args.results:
            try:
                header = sweep_results.sweep_header(workload, grid)
                file = sweep_results.ResultsFile(args.results, header)
            except sweep_results.ResultsError as wrong:
                raise InputError(str(wrong)) from wrong
            stack.callback(file.close)
            rows |= file.rows
            _say_what_is_there(args.results, file, len(configs))
        progress = stack.enter_context(_progress(len(configs), len(rows)))
        points = grid.points
        try:
            for outcome in sweep.sweep(
                workload, configs, done=list(rows), num_workers=args.workers
            ):
                row = {"index": outcome.index, "options": points[outcome.index]}
                if outcome.figures is None:
                    row["error"] = outcome.error
                else:
                    row["figures"] = outcome.figures
                rows[outcome.index] = row
                if file:
                    file.add(row)
                progress(len(rows))
        except replay.ReplayError as wrong:
            raise InputError(str(wrong)) from wrong
    # Tuples became lists in the file.
    return [rows[index] | {"options": points[index]} for index in sorted(rows)]


def _say_what_is_there(name: str, file, count: int) -> None:
    if file.num_torn_bytes:
        print(
            f"{name}: the last line was cut short ({file.num_torn_bytes} bytes) and is "
            "left out",
            file=sys.stderr,
        )
    if file.rows:
        print(f"{name}: {len(file.rows)} of {count} are there already", file=sys.stderr)


def _report(workload, grid, rows: list[dict], advice: list) -> dict[str, object]:
    front = {index for one in advice for index in one.front}
    return {
        "workload": workload.name,
        "num_requests": len(workload.requests),
        "fixed": dict(grid.fixed),
        "varied": {name: list(values) for name, values in grid.varied.items()},
        "recommended": [
            {
                "given": one.given,
                "index": one.row["index"],
                "options": one.row["options"],
                "reason": one.reason,
            }
            for one in advice
        ],
        "num_failed": sum("error" in row for row in rows),
        "rows": [row | {"on_front": row["index"] in front} for row in rows],
    }


@contextlib.contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[int], None]]:
    """A progress bar if somebody looks at standard error, else nothing."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sweeping", total=total, completed=done)
        yield lambda count: bar.update(task, completed=count)
