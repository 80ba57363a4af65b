"""Options of a replay that take several values, for `sweep`."""

import argparse
from collections.abc import Callable

from jaxsched.cli import replay_options

_SWITCHES = {"on": True, "off": False}


class ListOptions:
    """A group of options whose `add_argument` lets each of them be a list.

    Numbers and names are listed with commas. Options that are lists themselves have
    semicolons between their alternatives, and `none` for an empty list. Switches take
    `on`, `off` or `on,off`; alone, `--save-last` means `on` and `--no-save-last` `off`.
    """

    def __init__(self, group):
        self._group = group

    def add_argument(self, name: str, **given) -> None:
        """As of a group; `type`, `choices`, `metavar`, `help` and switches only."""
        if given.get("action") is argparse.BooleanOptionalAction:
            self._add_switch(name, given["help"])
            return
        one, choices = given.get("type", str), given.get("choices")
        if one is replay_options.offsets:
            self._group.add_argument(
                name, type=_offset_lists, metavar="N,N;N", help=given["help"]
            )
            return
        if choices:
            given["help"] = f"any of {', '.join(choices)}"
        self._group.add_argument(
            name,
            type=list_of(one, choices),
            metavar=given.get("metavar", "X,X"),
            help=given.get("help"),
        )

    def _add_switch(self, name: str, text: str) -> None:
        dest = name.removeprefix("--").replace("-", "_")
        self._group.add_argument(
            name, nargs="?", const=(True,), type=_switches, metavar="on,off", help=text
        )
        self._group.add_argument(
            f"--no-{name.removeprefix('--')}",
            dest=dest,
            action="store_const",
            const=(False,),
            help=argparse.SUPPRESS,
        )


def list_of(one: Callable[[str], object], choices: list[str] | None = None):
    """A converter of comma lists.

    Args:
      one: converts a value.
      choices: values that there are; None: whatever `one` takes.
    """
    kind = {int: "an integer", float: "a number"}.get(one, "a value")

    def convert(text: str) -> tuple:
        found = []
        for part in text.split(","):
            try:
                value = one(part.strip())
            except ValueError:
                value = None
            if value is None or not part.strip():
                raise argparse.ArgumentTypeError(
                    f"must be {kind}, or several with commas between them, got {text!r}"
                )
            if choices and value not in choices:
                raise argparse.ArgumentTypeError(
                    f"must be any of {', '.join(choices)}, got {value!r}"
                )
            found.append(value)
        return tuple(found)

    return convert


def _offset_lists(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(
        () if part.strip() == "none" else replay_options.offsets(part)
        for part in text.split(";")
    )


def _switches(text: str) -> tuple[bool, ...]:
    parts = [part.strip() for part in text.split(",")]
    if any(part not in _SWITCHES for part in parts):
        raise argparse.ArgumentTypeError(
            f"must be on, off or on,off, got {text!r} (put the workload before it)"
        )
    return tuple(_SWITCHES[part] for part in parts)
