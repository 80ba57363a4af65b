"""`python -m jaxsched workload`: makes a workload file from a description of traffic.

Kinds: chat, agents, shared-prompts, bursts, documents. The file has one JSON line a
request, with the segments of its prompt; `python -m jaxsched replay FILE` reads it.
The same kind, parameters and seed always give the same file.
"""

import argparse
import dataclasses
import json
import sys

from jaxsched.cli.reading import InputError
from jaxsched.cli.writing import check_target, write_whole


def add_parser(subparsers) -> None:
    """Adds the command to the program's argument parser."""
    parser = subparsers.add_parser(
        "workload",
        help="make a workload file from a description of traffic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("kind", nargs="?", metavar="KIND", help="see --list")
    parser.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the kind, may be given several times",
    )
    parser.add_argument("--seed", type=int, default=0, help="any integer (%(default)s)")
    parser.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="move the arrivals to exactly R requests a second on average",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write there, not to standard output"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print figures as one JSON object; lines are written only with -o",
    )
    parser.add_argument(
        "--list", action="store_true", help="list kinds and parameters, and stop"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    from jaxsched.simulation import generators, generators_files
    from jaxsched.simulation.workloads import WorkloadError

    if args.list:
        _print_kinds(args.json)
        return 0
    if args.kind is None:
        raise InputError(f"KIND is missing: one of {', '.join(generators.KINDS)}")
    if args.output is not None:
        check_target(args.output)
    try:
        workload = generators.generate(args.kind, args.seed, **_parameters(args.param))
        if args.rate is not None:
            workload = generators_files.scaled_to_rate(workload, args.rate)
        lines = list(generators_files.segment_lines(workload))
        figures = generators_files.summary(workload)
    except WorkloadError as wrong:
        raise InputError(str(wrong)) from wrong
    text = "".join(f"{line}\n" for line in lines)
    if args.output is not None:
        write_whole(args.output, lambda path: path.write_text(text, encoding="utf-8"))
        figures["file"] = args.output
    elif not args.json:
        sys.stdout.write(text)
        return 0
    print(json.dumps(figures) if args.json else _sentence(figures))
    return 0


def _parameters(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise InputError(f"--param must be NAME=VALUE, got {text!r}")
        if name in found:
            raise InputError(f"--param {name} is given twice")
        if name in ("kind", "seed"):
            raise InputError(f"--param {name}: there is an option of its own for it")
        found[name] = value.strip()
    return found


def _print_kinds(as_json: bool) -> None:
    from jaxsched.simulation.generators_kinds import KINDS

    if as_json:
        fields = {
            kind: {field.name: field.default for field in dataclasses.fields(made)}
            for kind, made in KINDS.items()
        }
        print(json.dumps(fields))
        return
    for kind, made in KINDS.items():
        print(f"{kind}: {made.__doc__.splitlines()[0]}")
        for field in dataclasses.fields(made):
            print(f"  {field.name}={field.default:g}  {field.metadata['help']}")


def _sentence(figures: dict) -> str:
    rate = figures["requests_per_second"]
    shown = "all at once" if rate is None else f"{rate:.2f} a second"
    return (
        f"{figures['file']}: {figures['num_requests']:,} requests ({shown}), "
        f"{figures['num_prompt_tokens']:,} prompt tokens, of which at most "
        f"{100 * figures['reusable_share']:.1f} % can be reused, "
        f"{figures['num_output_tokens']:,} output tokens"
    )
