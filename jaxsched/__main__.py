"""The command line: `python -m jaxsched COMMAND ...`."""

import argparse
import os
import sys

from jaxsched.cli import (
    costs,
    export,
    generate,
    plan,
    replay,
    size,
    sweep,
    verify,
    workload,
)
from jaxsched.cli.reading import InputError

_COMMANDS = (costs, export, generate, plan, replay, size, sweep, verify, workload)


class _Parser(argparse.ArgumentParser):
    """Complains in one line; the usage text is `--help`'s business."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Runs one command; bad input ends with status 2 and one line that says why."""
    parser = _Parser(
        prog="jaxsched",
        description="Snapshot-aware scheduling for hybrid models under jax.jit.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except InputError as wrong:
        print(f"jaxsched {args.command}: error: {wrong}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing is wrong on this side.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
