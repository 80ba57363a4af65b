"""`read_workload`: any workload file, its form recognised from its content."""

import contextlib
import gzip
import sys
import zlib
from collections.abc import Iterator

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
    with contextlib.closing(_filled_lines(name, shown)) as lines:
        first = next(lines, None)
        if first is None:
            raise WorkloadError(f"{shown}: empty, no requests")
        if first[1].lstrip().startswith("{"):
            reader = workloads_json.JsonReader(builder, hash_block)
            reader.read(*first)
        else:
            reader = workloads_csv.csv_reader(builder, *first)
        while limit is None or len(builder) < limit:
            line = next(lines, None)
            if line is None:
                break
            reader.read(*line)
    if hash_block is not None and not getattr(reader, "has_hash_ids", False):
        raise WorkloadError(f"{shown}: hash_block is given but there are no hash_ids")
    return builder.build(reader.form)


def _filled_lines(name: str, shown: str) -> Iterator[tuple[str, str]]:
    """Yields (`file:line`, text) for lines that are not blank."""
    number = 0
    try:
        with contextlib.ExitStack() as opened:
            if name == STDIN:
                raw = sys.stdin.buffer
            else:
                raw = opened.enter_context(open(name, "rb"))
            if raw.peek(2)[:2] == _GZIP:
                raw = opened.enter_context(gzip.GzipFile(fileobj=raw))
            for number, line in enumerate(raw, start=1):
                # Some spreadsheets put a byte order mark before the first column.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield f"{shown}:{number}", text
    except UnicodeDecodeError as wrong:
        raise WorkloadError(f"{shown}:{number}: not UTF-8 text: {wrong}") from wrong
    except (OSError, EOFError, zlib.error) as wrong:
        where = f"{shown}:{number + 1}" if number else shown
        raise WorkloadError(f"{where}: cannot be read: {wrong}") from wrong
