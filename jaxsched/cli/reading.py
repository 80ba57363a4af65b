"""Reading JSON lines so that every complaint names the file and the line."""

import gzip
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

STDIN = "-"


class InputError(ValueError):
    """Input that cannot be used; its text is the one line that the user reads."""


def open_text(name: str) -> TextIO:
    """Opens a file, a gzipped file, or standard input (`-`) as UTF-8 text.

    Raises:
      InputError: if the file cannot be opened.
    """
    if name == STDIN:
        return sys.stdin
    try:
        data = Path(name).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return io.StringIO(data.decode("utf-8"))
    except (OSError, EOFError, UnicodeDecodeError) as wrong:
        raise InputError(f"{name}: cannot be read: {wrong}") from wrong


def json_lines(name: str) -> Iterator[tuple[str, object]]:
    """Yields (`file:line`, value) for every line that is not blank.

    Raises:
      InputError: on a line that is not JSON, naming file, line and column.
    """
    shown = "<stdin>" if name == STDIN else name
    for number, line in enumerate(open_text(name), start=1):
        if not line.strip():
            continue
        where = f"{shown}:{number}"
        try:
            yield where, json.loads(line, parse_constant=_refuse_constant)
        except json.JSONDecodeError as wrong:
            raise InputError(
                f"{where}: not valid JSON at column {wrong.colno}: {wrong.msg}"
            ) from wrong
        except ValueError as wrong:
            raise InputError(f"{where}: {wrong}") from wrong


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not a number that JSON knows")
