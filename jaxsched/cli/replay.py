"""`python -m jaxsched replay`: a workload through the scheduler on a simulated clock.

Each step takes step-ms + token-us for every token scheduled + context-ns for every
token of context that the scheduled rows read. Prompts reuse what the hybrid cache has
of them: the blocks of a prefix and a state at its end.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxsched.cli import replay_options, replay_pages
from jaxsched.cli.reading import InputError
from jaxsched.cli.writing import check_target, write_whole

_PICTURES = (".png", ".pdf", ".svg")


def add_parser(subparsers) -> None:
    """Adds the command to the program's argument parser."""
    parser = subparsers.add_parser(
        "replay",
        help="run a workload through the scheduler, step by step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    replay_options.add_workload_options(parser)
    replay_options.add_config_options(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--requests", metavar="OUT.jsonl", help="one line a request")
    output.add_argument("--plot", metavar="OUT.png", help="a timeline (png, pdf, svg)")
    replay_pages.add_options(output)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    for path in (args.requests, args.plot):
        check_target(path)
    if args.plot and Path(args.plot).suffix.lower() not in _PICTURES:
        raise InputError(f"{args.plot}: --plot writes {', '.join(_PICTURES)}")
    replay_pages.check(args)
    # Only now: reading the options must not wait for jax.
    from jaxsched.simulation import metrics, replay

    config = replay_options.config_of(vars(args))
    workload = replay_options.workload_of(args)
    try:
        with _progress(len(workload.requests)) as progress:
            found = replay.replay(workload, config, progress)
    except replay.ReplayError as wrong:
        raise InputError(str(wrong)) from wrong
    if args.requests:
        write_whole(args.requests, lambda path: _write_requests(path, found))
    if args.plot:
        from jaxsched.simulation import timeline

        figure = timeline.draw_timeline(found)
        form = Path(args.plot).suffix.lower().removeprefix(".")
        write_whole(args.plot, lambda path: figure.savefig(path, format=form))
    replay_pages.write(args, found)
    figures = metrics.metrics(found) | replay_pages.goodput_figures(args, found)
    if args.json:
        print(json.dumps(figures))
    else:
        from jaxsched.cli import replay_table

        replay_table.print_metrics(figures, config)
        replay_pages.print_goodput(figures)
    return 0


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None] | None]:
    """A progress bar if somebody looks at standard error, else nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replaying", total=total)
        yield lambda ended: bar.update(task, completed=ended)


def _write_requests(path: Path, found) -> None:
    from jaxsched.simulation.metrics import request_report

    with path.open("w", encoding="utf-8") as file:
        for line in request_report(found):
            file.write(json.dumps(line) + "\n")
