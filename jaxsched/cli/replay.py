"""`python -m jaxsched replay`: a workload through the scheduler on a simulated clock.

Each step takes step-ms + token-us for every token scheduled + context-ns for every
token of context that the scheduled rows read. Prompts reuse what the hybrid cache has
of them: the blocks of a prefix and a state at its end.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxsched.cli import replay_pages
from jaxsched.cli.reading import InputError
from jaxsched.cli.writing import check_target, write_whole
from jaxsched.core.config import ChunkingPolicy, Rules, SnapshotMode

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
    _add_workload_options(parser)
    _add_scheduler_options(parser.add_argument_group("scheduler; 0: no limit"))
    _add_snapshot_options(parser.add_argument_group("snapshots"))
    _add_cache_options(parser.add_argument_group("cache; 0: unlimited"))
    _add_clock_options(parser.add_argument_group("clock"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--requests", metavar="OUT.jsonl", help="one line a request")
    output.add_argument("--plot", metavar="OUT.png", help="a timeline (png, pdf, svg)")
    replay_pages.add_options(output)
    parser.set_defaults(run=run)


def _add_workload_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload",
        nargs="?",
        help="JSON lines or CSV, plain or gzipped, - for standard input; the form is "
        "recognised from the content; default: generated chats",
    )
    parser.add_argument("--limit", type=_positive, help="requests to read")
    parser.add_argument("--seed", type=int, default=0, help="of the generated chats")
    parser.add_argument(
        "--hash-block", type=_positive, help="tokens of one hash id (default 512)"
    )


def _add_scheduler_options(group) -> None:
    group.add_argument("--rules", choices=[str(name) for name in Rules])
    group.add_argument(
        "--chunking-policy", choices=[str(name) for name in ChunkingPolicy]
    )
    for name, text in (
        ("--block-size", "tokens of a KV block"),
        ("--chunk-unit", "tokens; default the block size"),
        ("--max-num-seqs", "requests that run at a time"),
        ("--max-num-batched-tokens", "tokens of a step"),
        ("--max-context-length", "tokens of a chunk"),
        ("--draft-tokens", "proposed for every decode"),
        ("--accepted-draft-tokens", "of those, confirmed in every step"),
    ):
        group.add_argument(name, type=int, help=text)


def _add_snapshot_options(group) -> None:
    group.add_argument(
        "--snapshot-interval", type=int, help="tokens between periodic points; 0: none"
    )
    for name in ("--snapshot-from-start", "--snapshot-from-end"):
        group.add_argument(name, type=_offsets, metavar="N,N", help="offsets in tokens")
    group.add_argument("--snapshot-mode", choices=[str(name) for name in SnapshotMode])
    group.add_argument(
        "--max-emit-points", type=int, help="points inside one chunk, emit mode"
    )
    for name, text in (
        ("--save-last", "the last block boundary that an identical prompt can reach"),
        (
            "--branch-snapshots",
            "where a prompt leaves a stored one, and where an evicted state would "
            "have been hit (on)",
        ),
        ("--answer-snapshots", "at the end of every answer (on)"),
    ):
        group.add_argument(name, action=argparse.BooleanOptionalAction, help=text)


def _add_cache_options(group) -> None:
    group.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="off: nothing is reused and no snapshot is due",
    )
    for name, text in (
        ("--kv-blocks", "blocks of the pool"),
        ("--state-slots", "snapshots kept; the states of running requests come on top"),
        (
            "--pages-per-snapshot",
            "0: snapshots have slots of their own; else blocks of the pool that each "
            "takes",
        ),
        ("--state-tokens", "bytes of a snapshot in KV tokens, for --eviction"),
    ):
        group.add_argument(name, type=int, help=text)
    group.add_argument("--eviction", metavar="NAME", help="what goes first, see below")
    group.add_argument(
        "--capacity-policy", metavar="NAME", help="who is admitted, see below"
    )


def _add_clock_options(group) -> None:
    group.add_argument(
        "--rate-scale", type=float, help="arrivals this many times as fast"
    )
    group.add_argument(
        "--sequential",
        action=argparse.BooleanOptionalAction,
        help="each request arrives when the one before it has ended",
    )
    group.add_argument("--step-ms", type=float, help="every step")
    group.add_argument("--token-us", type=float, help="every scheduled token")
    group.add_argument("--context-ns", type=float, help="every token of context read")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _offsets(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be integers with commas between them, got {text!r}"
        ) from None


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    for path in (args.requests, args.plot):
        check_target(path)
    if args.plot and Path(args.plot).suffix.lower() not in _PICTURES:
        raise InputError(f"{args.plot}: --plot writes {', '.join(_PICTURES)}")
    replay_pages.check(args)
    # Only now: reading the options must not wait for jax.
    from jaxsched.simulation import metrics, replay

    config = _config(args)
    workload = _workload(args)
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


def _config(args: argparse.Namespace):
    """The `ReplayConfig` of the options; its own defaults where none is given."""
    from jaxsched.simulation.replay_config import ReplayConfig

    names = [field.name for field in dataclasses.fields(ReplayConfig)]
    given = {name: getattr(args, name) for name in names}
    for name in ("branch_snapshots", "answer_snapshots"):
        if given[name] and given["prefix_caching"] is False:
            raise InputError(
                f"--{name.replace('_', '-')} needs the prefix cache: leave out "
                "--no-prefix-caching"
            )
    try:
        return ReplayConfig(**{k: v for k, v in given.items() if v is not None})
    except ValueError as wrong:
        raise InputError(str(wrong)) from wrong


def _workload(args: argparse.Namespace):
    from jaxsched.simulation.workloads import WorkloadError
    from jaxsched.simulation.workloads_reading import read_workload
    from jaxsched.simulation.workloads_synthetic import synthetic_workload

    if args.workload is None:
        if args.hash_block is not None:
            raise InputError("--hash-block needs a workload file with hash_ids")
        return synthetic_workload(args.seed, limit=args.limit)
    try:
        return read_workload(
            args.workload, hash_block=args.hash_block, limit=args.limit
        )
    except WorkloadError as wrong:
        raise InputError(str(wrong)) from wrong


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
