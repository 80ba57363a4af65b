"""Results of a sweep in a file that can be continued: JSON lines, one a configuration.

The first line says which sweep it is. Every further line is written whole and flushed,
so a sweep that was killed loses at most the replays that were running; a last line
without an end is left over from that and is cut off.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from jaxsched.simulation.sweep_grid import Grid
from jaxsched.simulation.workloads import Workload

_FORM = "jaxsched-sweep-1"


class ResultsError(ValueError):
    """A file that does not hold results of this sweep; the text says why."""


def sweep_header(workload: Workload, grid: Grid) -> dict[str, object]:
    """What tells a sweep from another one, ready for JSON."""
    digest = hashlib.sha256()
    for request in workload.requests:
        digest.update(repr(_identity(request)).encode())
    return json.loads(
        json.dumps(
            {
                "form": _FORM,
                "workload": {
                    "name": workload.name,
                    "num_requests": len(workload.requests),
                    "digest": digest.hexdigest()[:16],
                },
                "fixed": dict(grid.fixed),
                "varied": {name: list(v) for name, v in grid.varied.items()},
            }
        )
    )


def _identity(request) -> tuple:
    """What a replay reads of a request; not where it was read from."""
    return (
        *(request.request_id, request.arrival_ns, request.num_prompt_tokens),
        *(request.max_new_tokens, request.prompt, request.answer),
        *(request.snapshot_points, request.priority, request.lora_id),
        request.cancel_at_ns,
    )


class ResultsFile:
    """Opened for one sweep: what is there already, and a place for more."""

    def __init__(self, name: str, header: Mapping[str, object]):
        """Reads what is there, or starts the file.

        Raises:
          ResultsError: if the file holds something else, naming the line.
        """
        self.rows: dict[int, dict[str, object]] = {}
        self.num_torn_bytes = 0
        self._path = Path(name)
        header = dict(header)
        try:
            text = self._path.read_bytes() if self._path.exists() else b""
            whole = text[: text.rfind(b"\n") + 1]
            self.num_torn_bytes = len(text) - len(whole)
            if whole:
                self._read(whole, header)
            elif text and not _starts(text, header):
                raise ResultsError(f"{name}:1: is not a results file of a sweep")
            self._file = self._path.open("r+b" if text else "wb")
            self._file.truncate(len(whole))
            self._file.seek(len(whole))
            if not whole:
                self._write(header)
        except OSError as wrong:
            raise ResultsError(f"{name}: {wrong.strerror}") from wrong

    def _read(self, whole: bytes, header: dict[str, object]) -> None:
        name = self._path
        num_points = 1
        for values in header["varied"].values():
            num_points *= len(values)
        for number, line in enumerate(whole.decode("utf-8", "replace").split("\n"), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as wrong:
                raise ResultsError(f"{name}:{number}: is not JSON: {wrong}") from wrong
            if number == 1:
                self._check_header(value, header)
                continue
            index = value.get("index") if isinstance(value, dict) else None
            if type(index) is not int or not 0 <= index < num_points:
                raise ResultsError(
                    f"{name}:{number}: index must be in [0, {num_points}), got "
                    f"{index!r}"
                )
            self.rows[index] = value

    def _check_header(self, found: object, header: dict[str, object]) -> None:
        where = f"{self._path}:1"
        if not isinstance(found, dict) or found.get("form") != _FORM:
            raise ResultsError(f"{where}: is not a results file of a sweep")
        for key in ("workload", "fixed", "varied"):
            if found.get(key) != header[key]:
                raise ResultsError(
                    f"{where}: holds another sweep: {key} was {found.get(key)}, now it "
                    f"is {header[key]}; name another file or delete this one"
                )

    def add(self, row: Mapping[str, object]) -> None:
        """Appends the row of one configuration, for good."""
        self.rows[row["index"]] = dict(row)
        self._write(row)

    def _write(self, value: Mapping[str, object]) -> None:
        self._file.write((json.dumps(value) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _starts(text: bytes, header: Mapping[str, object]) -> bool:
    """Whether text may be the beginning of a header line that was cut short."""
    return json.dumps(header).encode().startswith(text)
