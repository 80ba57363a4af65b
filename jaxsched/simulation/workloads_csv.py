"""Workloads in CSV: session links, Azure LLM inference traces, BurstGPT.

Azure: AzurePublicDataset, Splitwise (ISCA 2024). BurstGPT: HPMLL/BurstGPT. Neither has
any prefix identity: every prompt is its own. Session links give a row's parent and the
tokens that it shares with the parent's prompt and answer.
"""

import csv
import datetime
import re
from collections.abc import Callable
from decimal import Decimal

from jaxsched.core.config import MAX_COUNT
from jaxsched.core.host import check_count
from jaxsched.simulation.workloads import (
    Span,
    WorkloadBuilder,
    WorkloadError,
    first_tokens,
)

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_DECIMAL = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,2})?")
_INSTANT = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.([0-9]{1,9}))?(Z|[+-]\d\d:\d\d)?",
    re.ASCII,
)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MAX_SECONDS = 10**12


class CsvReader:
    """Reads one request from each row into a builder."""

    def __init__(
        self,
        builder: WorkloadBuilder,
        form: str,
        header: list[str],
        add: Callable[[WorkloadBuilder, str, dict], None],
    ):
        self.form = form
        self._builder, self._header, self._add = builder, header, add

    def read(self, where: str, line: str) -> None:
        """Adds the request of one row.

        Raises:
          WorkloadError: naming the place, the column and the value.
        """
        cells = _cells(where, line)
        if len(cells) != len(self._header):
            raise WorkloadError(
                f"{where}: {len(self._header)} columns are needed "
                f"({','.join(self._header)}), got {len(cells)}"
            )
        try:
            self._add(self._builder, where, dict(zip(self._header, cells, strict=True)))
        except WorkloadError:
            raise
        except ValueError as wrong:
            raise WorkloadError(f"{where}: {wrong}") from wrong


def csv_reader(builder: WorkloadBuilder, where: str, line: str) -> CsvReader:
    """The reader for a file that begins with this header.

    Raises:
      WorkloadError: if no known form has such a header.
    """
    header = _cells(where, line)
    for form, needed, add in _FORMS:
        if set(needed) <= set(header):
            return CsvReader(builder, form, header, add)
    known = "; ".join(f"{form} ({','.join(names)})" for form, names, _ in _FORMS)
    raise WorkloadError(
        f"{where}: neither a JSON object nor the header of a known CSV form: {known}; "
        f"got {line.strip()[:80]!r}"
    )


def _cells(where: str, line: str) -> list[str]:
    try:
        rows = list(csv.reader([line], strict=True))
    except csv.Error as wrong:
        raise WorkloadError(f"{where}: not valid CSV: {wrong}") from wrong
    return [cell.strip() for cell in rows[0]]


def _add_link(builder: WorkloadBuilder, where: str, row: dict) -> None:
    index = len(builder)
    length = _count(row, "input_len", low=1)
    output = _count(row, "output_len", low=1)
    parent = _count(row, "parent", low=-1)
    shared = _count(row, "shared_len")
    if parent >= index:
        raise ValueError(f"parent must be an earlier row than {index}, got {parent}")
    most = length
    if parent < 0:
        most = 0
    else:
        before = builder[parent]
        most = min(length, before.num_prompt_tokens + before.max_new_tokens)
    if shared > most:
        raise ValueError(
            f"shared_len must be at most {most} (input_len={length}, parent={parent}), "
            f"got {shared}"
        )
    prompt: list[Span] = []
    if shared:
        prompt = first_tokens((*before.prompt, before.answer), shared)
    if length > shared:
        prompt.append(builder.span(("own", index), length - shared))
    builder.add(
        request_id=index,
        where=where,
        arrival_ns=_seconds(row, "timestamp_s"),
        prompt=prompt,
        max_new_tokens=output,
    )


def _add_azure(builder: WorkloadBuilder, where: str, row: dict) -> None:
    _add_plain(
        builder,
        where,
        _instant(row, "TIMESTAMP"),
        _count(row, "ContextTokens"),
        _count(row, "GeneratedTokens"),
    )


def _add_burst(builder: WorkloadBuilder, where: str, row: dict) -> None:
    _add_plain(
        builder,
        where,
        _seconds(row, "Timestamp"),
        _count(row, "Request tokens"),
        _count(row, "Response tokens"),
    )


def _add_plain(
    builder: WorkloadBuilder, where: str, arrival: int, length: int, output: int
) -> None:
    if length == 0 or output == 0:
        # Failed calls are logged without tokens; there is nothing to schedule.
        builder.num_dropped += 1
        return
    index = len(builder)
    builder.add(
        request_id=index,
        where=where,
        arrival_ns=arrival,
        prompt=[builder.span(("own", index), length)],
        max_new_tokens=output,
    )


_FORMS = (
    (
        "session links",
        ("timestamp_s", "input_len", "output_len", "parent", "shared_len"),
        _add_link,
    ),
    ("Azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _add_azure),
    ("BurstGPT", ("Timestamp", "Request tokens", "Response tokens"), _add_burst),
)


def _count(row: dict, name: str, low: int = 0) -> int:
    text = row[name]
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{name} must be an integer, got {text!r}")
    return check_count(name, int(text), low, MAX_COUNT)


def _seconds(row: dict, name: str) -> int:
    """A time in seconds as whole nanoseconds."""
    text = row[name]
    if not _DECIMAL.fullmatch(text):
        raise ValueError(f"{name} must be a number of seconds, got {text!r}")
    value = Decimal(text)
    if not 0 <= value <= _MAX_SECONDS:
        raise ValueError(f"{name} must be in [0, {_MAX_SECONDS}], got {text}")
    return round(value * 10**9)


def _instant(row: dict, name: str) -> int:
    """A date and time, UTC where no zone is given, as nanoseconds since 1970."""
    text = row[name]
    found = _INSTANT.fullmatch(text)
    try:
        if not found:
            raise ValueError
        day, fraction, zone = found.groups()
        zone = "+00:00" if zone in (None, "Z") else zone
        instant = datetime.datetime.fromisoformat(day + zone)
    except ValueError:
        raise ValueError(
            f"{name} must be a time like 2023-11-16 18:17:03.9799600, got {text!r}"
        ) from None
    whole = (instant - _EPOCH) // datetime.timedelta(seconds=1)
    return whole * 10**9 + int((fraction or "0").ljust(9, "0"))
