"""Options of a replay, and the workload and configuration that they stand for.

`sweep` has the same options, with several values each.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping

from jaxsched.cli.reading import InputError
from jaxsched.core.config import ChunkingPolicy, Rules, SnapshotMode


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """What is replayed."""
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


def add_config_options(
    parser: argparse.ArgumentParser, wrap: Callable = lambda group: group
) -> None:
    """The fields of `ReplayConfig`, in groups.

    Args:
      parser: of the command.
      wrap: turns a group into something with the same `add_argument`.
    """
    for title, add in (
        ("scheduler; 0: no limit", _add_scheduler_options),
        ("snapshots", _add_snapshot_options),
        ("cache; 0: unlimited", _add_cache_options),
        ("clock", _add_clock_options),
    ):
        add(wrap(parser.add_argument_group(title)))


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
        group.add_argument(name, type=offsets, metavar="N,N", help="offsets in tokens")
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
        ("--decode-snapshots", "at periodic points that an answer comes past (on)"),
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


def offsets(text: str) -> tuple[int, ...]:
    """Integers with commas between them."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be integers with commas between them, got {text!r}"
        ) from None


def config_names(options: Mapping[str, object]) -> list[str]:
    """Those of the options that say how a replay is configured and that were given."""
    from jaxsched.simulation.replay_config import ReplayConfig

    names = [field.name for field in dataclasses.fields(ReplayConfig)]
    return [name for name in names if options.get(name) is not None]


def config_of(options: Mapping[str, object]):
    """The `ReplayConfig` of options; its own defaults where none is given.

    Raises:
      InputError: naming the field and the value.
    """
    from jaxsched.simulation.replay_config import ReplayConfig

    names = [field.name for field in dataclasses.fields(ReplayConfig)]
    given = {name: options.get(name) for name in names}
    for name in ("branch_snapshots", "answer_snapshots", "decode_snapshots"):
        if given[name] and given["prefix_caching"] is False:
            raise InputError(
                f"--{name.replace('_', '-')} needs the prefix cache: leave out "
                "--no-prefix-caching"
            )
    try:
        return ReplayConfig(**{k: v for k, v in given.items() if v is not None})
    except ValueError as wrong:
        raise InputError(str(wrong)) from wrong


def workload_of(args: argparse.Namespace):
    """The workload that the options name.

    Raises:
      InputError: naming file, line and field.
    """
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
