"""`python -m jaxsched verify DIR`: checks a checkpoint folder of a hybrid model.

The served model is run in one pass, cut at random places, token by token, batched with
other rows, decoded, and restored from snapshots; paths that promise equal bits are
compared bit for bit. A plain whole-sequence model, and the folder's `logits.npy`,
`snap_*.safetensors` and `states.safetensors` for `tokens.npy`, are compared within a
tolerance: 1e-5 absolute and relative in float32 (zamba2 5e-5), 0.1 in bfloat16. Exit
status 1 if a check fails.
"""

import argparse
import dataclasses
import json
import math

from jaxsched.cli.reading import InputError


def add_parser(subparsers) -> None:
    """Adds the command to the program's argument parser."""
    parser = subparsers.add_parser(
        "verify",
        help="check a hybrid model's cache behaviour and parity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="config.json, weights, and what to compare with")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights"
    )
    parser.add_argument("--atol", type=_tolerance, help="absolute tolerance")
    parser.add_argument("--rtol", type=_tolerance, help="relative tolerance")
    parser.add_argument(
        "--chunk-size", type=_positive, help="scan grid; default: the configuration's"
    )
    parser.add_argument(
        "--page-size", type=_positive, default=8, help="tokens of a key page"
    )
    parser.add_argument(
        "--num-tokens",
        type=_positive,
        default=37,
        help="of the made-up rows where there is no tokens.npy",
    )
    parser.add_argument(
        "--num-schedules", type=_positive, default=3, help="random ones a check"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random schedules")
    parser.add_argument(
        "--tails",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="carry the open chunk's rows, which makes every cut exact",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    from jaxsched.models.verification import FolderError, Options, verify_folder

    options = Options(
        dtype=args.dtype,
        atol=args.atol,
        rtol=args.rtol,
        chunk_size=args.chunk_size,
        page_size=args.page_size,
        num_tokens=args.num_tokens,
        num_schedules=args.num_schedules,
        seed=args.seed,
        carry_tails=args.tails,
    )
    try:
        config, checks = verify_folder(args.folder, options)
    except FolderError as wrong:
        raise InputError(str(wrong)) from wrong
    passed = all(check.passed for check in checks)
    if args.json:
        answer = {
            "folder": args.folder,
            "family": config.family,
            "dtype": args.dtype,
            "chunk_size": config.mamba.chunk_size,
            "passed": passed,
            "checks": [_plain(check) for check in checks],
        }
        print(json.dumps(answer))
    else:
        _print_table(args.folder, config, checks)
    return 0 if passed else 1


def _plain(check) -> dict:
    values = dataclasses.asdict(check)
    if not math.isfinite(values["max_difference"]):
        values["max_difference"] = None  # JSON knows no infinity
    return values


def _print_table(folder: str, config, checks) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", overflow="fold")
    table.add_column("asks", no_wrap=True)
    for name in ("wrong", "max diff"):
        table.add_column(name, justify="right", no_wrap=True)
    for check in checks:
        name = Text(check.name)
        if check.where:
            name.append(f"\n  at {check.where}", style="dim")
        table.add_row(
            Text("ok", style="green") if check.passed else Text("FAIL", style="red"),
            name,
            "bits" if check.bitwise else "close",
            f"{check.num_wrong} of {check.num_compared}",
            f"{check.max_difference:.2e}" if check.max_difference else "0",
        )
    console = Console()
    chunk = config.mamba.chunk_size
    console.print(Text(f"{folder}: {config.family}, scan chunk {chunk}", style="bold"))
    console.print(table)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _tolerance(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"must be >= 0, got {text}")
    return value
