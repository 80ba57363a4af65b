"""Pages and traces that the replay command writes, and the limits for goodput."""

import argparse
import json
from pathlib import Path

from jaxsched.cli.reading import InputError
from jaxsched.cli.writing import check_target, write_whole

_PICTURES = (".png", ".pdf", ".svg")
_LIMITS = ("ttft_ms", "tpot_ms")


def add_options(group) -> None:
    """Adds the options to the group for outputs."""
    group.add_argument(
        "--overview", metavar="OUT.png", help="one page of panels (png, pdf, svg)"
    )
    group.add_argument("--html", metavar="OUT.html", help="one file, tables as well")
    group.add_argument(
        "--trace-json",
        metavar="OUT.json",
        help="trace events for ui.perfetto.dev or chrome://tracing",
    )
    for name, text in (
        ("--limit-ttft-ms", "count who has its first token within"),
        ("--limit-tpot-ms", "count who has its further tokens within, on average"),
    ):
        group.add_argument(name, type=float, metavar="MS", help=text)


def check(args: argparse.Namespace) -> None:
    """Refuses what could not be written, before the work is done."""
    for path in (args.overview, args.html, args.trace_json):
        check_target(path)
    if args.overview and Path(args.overview).suffix.lower() not in _PICTURES:
        raise InputError(f"{args.overview}: --overview writes {', '.join(_PICTURES)}")
    for name, limit in limits(args).items():
        if not limit > 0:
            shown = name.replace("_", "-")
            raise InputError(f"--limit-{shown} must be above 0, got {limit:g}")


def limits(args: argparse.Namespace) -> dict[str, float]:
    """The limits that were given."""
    given = {name: getattr(args, f"limit_{name}") for name in _LIMITS}
    return {name: limit for name, limit in given.items() if limit is not None}


def write(args: argparse.Namespace, run) -> None:
    """Writes the files that were asked for."""
    if args.overview:
        from jaxsched.simulation.overview import draw_overview

        figure = draw_overview(run, limits(args))
        form = Path(args.overview).suffix.lower().removeprefix(".")
        write_whole(args.overview, lambda path: figure.savefig(path, format=form))
    if args.html:
        from jaxsched.simulation.overview_html import overview_html

        page = overview_html(run, limits(args))
        write_whole(args.html, lambda path: path.write_text(page, encoding="utf-8"))
    if args.trace_json:
        from jaxsched.simulation.overview_trace import trace_events

        text = json.dumps(trace_events(run))
        write_whole(
            args.trace_json, lambda path: path.write_text(text, encoding="utf-8")
        )


def goodput_figures(args: argparse.Namespace, run) -> dict[str, object]:
    """Goodput as one more figure; nothing without limits."""
    if not limits(args):
        return {}
    from jaxsched.simulation.goodput import goodput

    return {"goodput": goodput(run, **limits(args))}


def print_goodput(found: dict[str, object]) -> None:
    """A line on goodput, if there is any."""
    good = found.get("goodput")
    if good is None:
        return
    rate = good["good_requests_per_s"]
    shown = "" if rate is None else f", {rate:.2f} a second"
    print(
        f"within the limits: {good['num_good']} of {good['num_requests']} requests "
        f"({100 * good['good_share']:.1f} %){shown}"
    )
