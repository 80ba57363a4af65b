"""`python -m jaxsched costs`: what steps of a model take on a hardware, by a roofline.

Decode steps and whole prompts, by class of operators, and the numbers of `replay`'s
cost line with their error over the steps of a server. Nothing is measured.
"""

import argparse
import dataclasses
import json

from jaxsched.cli.reading import InputError

_DECODES = ((1, 2048), (32, 2048), (128, 8192))
_PROMPTS = (2048, 8192, 32768)
_WIDTH = 104  # columns that the table needs


def add_parser(subparsers) -> None:
    """Adds the command to the program's argument parser."""
    parser = subparsers.add_parser(
        "costs",
        help="what steps of a model take on a hardware",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="NAME|config.json", help="see `size --list`")
    add("--hardware", default="H200", metavar="NAME|FILE.json", help="(%(default)s)")
    add("--tensor-parallel", type=int, default=1, metavar="RANKS")
    for field in ("weights", "kv", "state", "conv"):
        add(f"--{field}-dtype", metavar="TYPE", help="as in `size`")
    add("--max-num-batched-tokens", type=int, default=8192, help="of a step")
    add("--max-num-seqs", type=int, default=256, help="decode rows of a step")
    add("--max-context-length", type=int, default=32768, help="tokens")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        report = costs_report(args)
    except ValueError as wrong:
        raise InputError(str(wrong)) from wrong
    if args.json:
        print(json.dumps(report))
    else:
        _print_report(report)
    return 0


def costs_report(args: argparse.Namespace) -> dict:
    """All figures of the command as one JSON object.

    Raises:
      ValueError: naming the option or the field that is wrong.
    """
    if args.model is None:
        raise ValueError("--model is missing; `size --list` names the known ones")
    from jaxsched.cache.sizing import ElementTypes
    from jaxsched.simulation import costs, costs_linear
    from jaxsched.simulation.costs_hardware import find_hardware
    from jaxsched.simulation.costs_models import describe_model

    types = {
        field.name: getattr(args, f"{field.name}_dtype")
        for field in dataclasses.fields(ElementTypes)
    }
    model, hardware = describe_model(args.model), find_hardware(args.hardware)
    found = costs.step_costs(
        model,
        hardware,
        ElementTypes(**{name: value for name, value in types.items() if value}),
        tensor_parallel=args.tensor_parallel,
    )
    steps = costs_linear.OperatingRange(
        max_tokens=args.max_num_batched_tokens,
        max_rows=args.max_num_seqs,
        max_context=args.max_context_length,
    )
    decodes = {
        f"decode {rows} x {context:,}": costs.StepLoad(
            decode_rows=float(rows), context_tokens=float(rows * context)
        )
        for rows, context in _DECODES
    }
    prompts = {
        f"prompt {tokens:,}": costs.StepLoad(
            prefill_tokens=float(tokens),
            token_pairs=costs.pairs_of_chunk(0.0, float(tokens)),
            num_chunks=1.0,
        )
        for tokens in _PROMPTS
    }
    return {
        "model": model.name,
        "hardware": hardware.name,
        "hardware_source": hardware.source,
        "tensor_parallel": args.tensor_parallel,
        "step_ms": {
            name: _milliseconds(costs.step_times_us(found, load))
            for name, load in (decodes | prompts).items()
        },
        "snapshot_us": costs_linear.snapshot_us(found),
        "replay_line": dataclasses.asdict(costs_linear.replay_line(found, steps)),
        "linear": dataclasses.asdict(costs_linear.linear_costs(found, steps)),
        "tabled": dataclasses.asdict(costs_linear.tabled_costs(found, steps)),
    }


def _milliseconds(times: dict) -> dict[str, float]:
    found = {str(kind): float(spent) / 1000 for kind, spent in times.items()}
    return {"all": sum(found.values())} | found


def _print_report(report: dict) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    ranks = report["tensor_parallel"]
    devices = report["hardware"] if ranks == 1 else f"{ranks} x {report['hardware']}"
    title = Text(f"{report['model']} on {devices}: milliseconds")
    steps = report["step_ms"]
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("class", no_wrap=True)
    for name in steps:
        table.add_column(name, justify="right")
    kinds = [kind for kind in next(iter(steps.values())) if kind != "all"]
    for kind in (*kinds, "all"):
        values = [one[kind] for one in steps.values()]
        if any(values):
            table.add_row(kind, *(f"{value:,.3f}" for value in values))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table, width=max(console.width, _WIDTH))
    if report["snapshot_us"]:
        console.print(f"a snapshot: {report['snapshot_us']:,.1f} us")
    line = report["replay_line"]
    middle, most = (100 * line[f"{name}_error"] for name in ("median", "max"))
    console.print(
        f"replay: --step-ms {line['step_ms']:.3f} --token-us {line['token_us']:.3f} "
        f"--context-ns {line['context_ns']:.3f} "
        f"(off by {middle:.0f} % in the median, {most:.0f} % at most)"
    )
