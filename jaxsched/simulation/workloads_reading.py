"""`read_workload`: any workload file, its form recognised from its content."""

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from jaxsched.simulation import workloads_csv, workloads_json
from jaxsched.simulation.workloads import Workload, WorkloadBuilder, WorkloadError

STDIN = "-"
_GZIP = b"\x1f\x8b"


def read_workload(
    name: str, *, hash_block: int | None = None, limit: int | None = None
) -> Workload:
    """Reads a workload file, plain or gzipped; `-` is standard input.

    Forms: JSON lines with `hash_ids` (Mooncake), `token_ids` or `segments`; CSV with
    the columns of session links, of the Azure LLM inference traces, or of BurstGPT.

    Args:
      name: path.
      hash_block: tokens of one hash id; default 512, and only for lines that have them.
      limit: requests to read, from the first line on.

    Raises:
      WorkloadError: on anything that is not right, naming file, line, field, value.
    """
    shown = "<stdin>" if name == STDIN else name
    builder = WorkloadBuilder(shown)
    lines = _filled_lines(shown, _open(name))
    first = next(lines, None)
    if first is None:
        raise WorkloadError(f"{shown}: empty, no requests")
    if first[1].lstrip().startswith("{"):
        reader = workloads_json.JsonReader(builder, hash_block)
        reader.read(*first)
    else:
        reader = workloads_csv.csv_reader(builder, *first)
    for where, line in lines:
        if limit is not None and len(builder) >= limit:
            break
        reader.read(where, line)
    if hash_block is not None and not getattr(reader, "has_hash_ids", False):
        raise WorkloadError(f"{shown}: hash_block is given but there are no hash_ids")
    return builder.build(reader.form)


def _open(name: str) -> BinaryIO:
    try:
        raw = sys.stdin.buffer if name == STDIN else open(name, "rb")
        buffered = raw if hasattr(raw, "peek") else io.BufferedReader(raw)
        if buffered.peek(2)[:2] == _GZIP:
            return gzip.GzipFile(fileobj=buffered)
        return buffered
    except OSError as wrong:
        raise WorkloadError(f"{name}: cannot be read: {wrong.strerror}") from wrong


def _filled_lines(shown: str, stream: BinaryIO) -> Iterator[tuple[str, str]]:
    """Yields (`file:line`, text) for lines that are not blank; closes the file."""
    number = 0
    try:
        with stream:
            for number, line in enumerate(stream, start=1):
                # Some spreadsheets put a byte order mark before the first column.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield f"{shown}:{number}", text
    except UnicodeDecodeError as wrong:
        raise WorkloadError(f"{shown}:{number}: not UTF-8 text: {wrong}") from wrong
    except (OSError, EOFError, zlib.error) as wrong:
        raise WorkloadError(
            f"{shown}:{number + 1}: cannot be read further: {wrong}"
        ) from wrong
