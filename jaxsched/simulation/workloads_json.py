"""Workload lines in JSON: `hash_ids`, `token_ids` or `segments` prompts."""

import difflib
import json
import math
from decimal import Decimal

from jaxsched.core.build import MAX_LORA_ID
from jaxsched.core.config import MAX_COUNT, NO_ID
from jaxsched.core.host import check_count, check_counts
from jaxsched.simulation.workloads import Span, WorkloadBuilder, WorkloadError

DEFAULT_HASH_BLOCK = 512
MAX_POINTS = 4096
"""Most snapshot points of one line: each takes a column of the request table."""

MAX_TIMESTAMP_MS = 10**15
_ANSWER = "answer:"
_PROMPTS = ("hash_ids", "token_ids", "segments")
_FIELDS = (
    *("timestamp", "input_length", "output_length", *_PROMPTS),
    *("id", "snapshot_points", "priority", "lora_id", "cancel_at"),
)


class JsonReader:
    """Reads one request from each line into a builder."""

    form = "json lines"

    def __init__(self, builder: WorkloadBuilder, hash_block: int | None):
        self._builder = builder
        self._hash_block = DEFAULT_HASH_BLOCK if hash_block is None else hash_block
        check_count("hash_block", self._hash_block, low=1)
        self.has_hash_ids = False

    def read(self, where: str, line: str) -> None:
        """Adds the request of one line.

        Raises:
          WorkloadError: naming the place, the field and the value.
        """
        try:
            fields = json.loads(line, object_pairs_hook=_without_repeats)
        except json.JSONDecodeError as wrong:
            raise WorkloadError(
                f"{where}: not valid JSON at column {wrong.colno}: {wrong.msg}"
            ) from wrong
        except (ValueError, RecursionError) as wrong:
            raise WorkloadError(f"{where}: {wrong}") from wrong
        if not isinstance(fields, dict):
            raise WorkloadError(f"{where}: a line must be a JSON object")
        try:
            self._add(where, fields)
        except WorkloadError:
            raise
        except ValueError as wrong:
            raise WorkloadError(f"{where}: {wrong}") from wrong

    def _add(self, where: str, fields: dict) -> None:
        _check_names(fields)
        given = {name: value for name, value in fields.items() if value is not None}
        request_id = given.get("id", len(self._builder))
        if isinstance(request_id, bool) or not isinstance(request_id, str | int):
            raise ValueError(f"id must be a string or an integer, got {request_id!r}")
        arrival = _nanoseconds("timestamp", _needed(given, "timestamp"))
        cancel_at = given.get("cancel_at")
        if cancel_at is not None:
            cancel_at = _nanoseconds("cancel_at", cancel_at)
            if cancel_at < arrival:
                raise ValueError(
                    f"cancel_at must not be before timestamp={given['timestamp']}, "
                    f"got {given['cancel_at']}"
                )
        output = check_count("output_length", _needed(given, "output_length"), low=1)
        prompt = self._prompt(where, given)
        length = sum(span.length for span in prompt)
        stated = given.get("input_length")
        if stated is not None and check_count("input_length", stated) != length:
            raise ValueError(f"input_length is {stated}, the prompt has {length}")
        self._builder.add(
            request_id=request_id,
            where=where,
            arrival_ns=arrival,
            prompt=prompt,
            max_new_tokens=output,
            snapshot_points=_points(given.get("snapshot_points", [])),
            priority=check_count("priority", given.get("priority", 0), low=-MAX_COUNT),
            lora_id=check_count(
                "lora_id", given.get("lora_id", NO_ID), NO_ID, MAX_LORA_ID
            ),
            cancel_at_ns=cancel_at,
        )

    def _prompt(self, where: str, given: dict) -> list[Span]:
        kinds = [name for name in _PROMPTS if name in given]
        if not kinds:
            raise ValueError(f"one of {', '.join(_PROMPTS)} is missing")
        if len(kinds) > 1:
            raise ValueError(f"{kinds[0]} and {kinds[1]} are both given")
        if kinds[0] == "hash_ids":
            return self._from_hash_ids(given)
        if kinds[0] == "segments":
            return self._from_segments(where, given["segments"])
        token_ids = check_counts("token_ids", given["token_ids"])
        if not token_ids:
            raise ValueError("token_ids must not be empty")
        return [self._builder.literal(("literal", where), token_ids)]

    def _from_hash_ids(self, given: dict) -> list[Span]:
        self.has_hash_ids = True
        block = self._hash_block
        length = check_count("input_length", _needed(given, "input_length"), low=1)
        ids = given["hash_ids"]
        if not isinstance(ids, list):
            raise ValueError(f"hash_ids must be a list of integers, got {ids!r}")
        needed = -(-length // block)
        if len(ids) != needed:
            raise ValueError(
                f"hash_ids must have {needed} entries for input_length={length} in "
                f"blocks of {block}, got {len(ids)}"
            )
        spans = []
        for at, name in enumerate(ids):
            # A hash may well be a 64-bit number: it is only a name here.
            if isinstance(name, bool) or not isinstance(name, int) or name < 0:
                raise ValueError(
                    f"hash_ids[{at}] must be an integer >= 0, got {name!r}"
                )
            size = min(block, length - at * block)
            spans.append(self._builder.span(("hash", name), size))
        return spans

    def _from_segments(self, where: str, segments: object) -> list[Span]:
        if not isinstance(segments, list):
            raise ValueError(f"segments must be a list of pairs, got {segments!r}")
        spans = []
        for at, pair in enumerate(segments):
            field = f"segments[{at}]"
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError(f"{field} must be [name, tokens], got {pair!r}")
            name, length = pair
            if not isinstance(name, str) or not name:
                raise ValueError(f"{field}: the name must be a string, got {name!r}")
            check_count(f"{field}: tokens of {name!r}", length)
            if name.startswith(_ANSWER):
                of = name.removeprefix(_ANSWER)
                spans.append(self._builder.repeat_answer(where, field, of, length))
            else:
                spans.append(self._builder.span(("segment", name), length))
        return spans


def _without_repeats(pairs: list[tuple[str, object]]) -> dict:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is given twice")
    return fields


def _check_names(fields: dict) -> None:
    """Refuses a misspelt field; traces may carry columns of their own besides."""
    for name in fields:
        if name in _FIELDS:
            continue
        close = difflib.get_close_matches(name, _FIELDS, n=1, cutoff=0.8)
        if close and close[0] not in fields:
            raise ValueError(f"unknown field {name}, did you mean {close[0]}?")


def _needed(fields: dict, name: str) -> object:
    if name not in fields:
        raise ValueError(f"{name} is missing")
    return fields[name]


def _nanoseconds(field: str, value: object) -> int:
    """A time in milliseconds as whole nanoseconds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field} must be a number of milliseconds, got {value!r}")
    if not math.isfinite(value) or not 0 <= value <= MAX_TIMESTAMP_MS:
        raise ValueError(f"{field} must be in [0, {MAX_TIMESTAMP_MS}], got {value}")
    return round(Decimal(repr(value)) * 10**6)


def _points(value: object) -> tuple[int, ...]:
    points = check_counts("snapshot_points", value)
    if len(points) > MAX_POINTS:
        raise ValueError(
            f"snapshot_points has {len(points)} entries, at most {MAX_POINTS} are "
            "possible: regular points come from the snapshot interval"
        )
    for at, (one, other) in enumerate(zip(points, points[1:], strict=False), start=1):
        if other <= one:
            raise ValueError(
                f"snapshot_points must ascend, got {other} after {one} at entry {at}"
            )
    return tuple(points)
