"""Host-side constructors: from Python records to tables, with every value checked."""

import dataclasses
from collections.abc import Iterable, Mapping

import jax.numpy as jnp
import numpy as np

from jaxsched.core.config import MAX_COUNT, NO_ID, UNLIMITED, Phase, Reason
from jaxsched.core.host import check_count, check_counts, check_flag
from jaxsched.core.plan import Budget
from jaxsched.core.requests import RequestTable

MAX_UNIT = 2**27
"""Largest chunk unit: the planner adds a few units to a length before comparing."""

MAX_DRAFT_TOKENS = 2**15
"""Most draft tokens of one row: 65,536 rows of them still sum up in 32 bits."""

MAX_LORA_ID = 2**16 - 2
"""Largest adapter slot: slot and row are sorted as one 32-bit key."""

_PHASES = {phase.name.lower(): phase for phase in Phase if phase != Phase.EMPTY}
_HOLDS = {reason.name.lower(): reason for reason in Reason}


@dataclasses.dataclass(frozen=True)
class _Field:
    """How one integer field of a record is read."""

    default: int | None  # None: the record must have it
    low: int = 0
    high: int = MAX_COUNT


_COUNTS = {
    "num_prompt_tokens": _Field(None, low=1),
    "num_computed_tokens": _Field(0),
    "num_cached_tokens": _Field(0),
    "num_reusable_tokens": _Field(0),
    "num_output_tokens": _Field(0),
    "max_new_tokens": _Field(MAX_COUNT, low=1),
    "num_draft_tokens": _Field(0, high=MAX_DRAFT_TOKENS),
    "num_encoder_tokens": _Field(0),
    "beam_width": _Field(1, low=1, high=MAX_DRAFT_TOKENS),
    "priority": _Field(0, low=-MAX_COUNT),
    "arrival": _Field(0),
    "snapshot_interval": _Field(0),
}
_OTHERS = ("request_id", "phase", "lora_id", "in_flight", "hold_reason")
_POINTS = ("requested_points", "snapshot_points")
_PADDING = {"request_id": NO_ID, "lora_id": NO_ID, "beam_width": 1}


def bucket_size(count: int, smallest: int = 1) -> int:
    """The next power of two: tables in buckets compile once for many sizes."""
    return max(smallest, 1 << max(count - 1, 0).bit_length())


def request_table(
    records: Iterable[Mapping[str, object]],
    *,
    num_rows: int | None = None,
    num_points: int | None = None,
    num_requested_points: int | None = None,
) -> RequestTable:
    """Builds a `RequestTable` from records with its field names as keys.

    `num_prompt_tokens` must be given; every other field has a default. `phase` is a
    name in lower case (default `prefill`), `lora_id` an integer or None, points are
    ascending lists, `hold_reason` the lower-case name of a `Reason`.

    Args:
      records: in first-come order.
      num_rows: R; default the next power of two.
      num_points: columns of `snapshot_points`; default the longest list (at least 1).
      num_requested_points: the same for `requested_points`.

    Raises:
      ValueError: naming the record, the field and the value, on anything that is
        not a number in range, on unknown fields, on points that do not ascend, and on
        records or points that the given sizes do not hold.
    """
    columns = request_columns(
        records,
        num_rows=num_rows,
        num_points=num_points,
        num_requested_points=num_requested_points,
    )
    return RequestTable(**{name: jnp.asarray(v) for name, v in columns.items()})


def request_columns(
    records: Iterable[Mapping[str, object]],
    *,
    num_rows: int | None = None,
    num_points: int | None = None,
    num_requested_points: int | None = None,
) -> dict[str, np.ndarray]:
    """The fields of `request_table(...)` as NumPy arrays: to stack many tables."""
    rows = [_read_record(f"requests[{i}]", r) for i, r in enumerate(records)]
    size = bucket_size(len(rows)) if num_rows is None else num_rows
    check_count("num_rows", size, low=1)
    if len(rows) > size:
        raise ValueError(f"{len(rows)} requests do not fit into num_rows={size}")
    columns = {
        name: np.full(size, _PADDING.get(name, 0), np.int32)
        for name in (*_COUNTS, *_OTHERS)
    }
    for name, column in columns.items():
        column[: len(rows)] = [row[name] for row in rows]
    columns["in_flight"] = columns["in_flight"].astype(bool)
    widths = {"snapshot_points": num_points, "requested_points": num_requested_points}
    for name, width in widths.items():
        columns[name] = _points_array(name, [row[name] for row in rows], size, width)
    return columns


def _read_record(where: str, record: Mapping[str, object]) -> dict:
    if not isinstance(record, Mapping):
        raise ValueError(f"{where} must be a mapping of fields, got {record!r}")
    unknown = sorted(set(record) - set(_COUNTS) - set(_OTHERS) - set(_POINTS))
    if unknown:
        raise ValueError(f"{where} has an unknown field {unknown[0]!r}")
    row = {}
    for name, field in _COUNTS.items():
        if name in record:
            value = record[name]
            row[name] = check_count(f"{where}.{name}", value, field.low, field.high)
        elif field.default is None:
            raise ValueError(f"{where}.{name} is missing")
        else:
            row[name] = field.default
    for name in _POINTS:
        points = record.get(name)
        row[name] = [] if points is None else _read_points(f"{where}.{name}", points)
    row["request_id"] = check_count(
        f"{where}.request_id", record.get("request_id", NO_ID), low=NO_ID
    )
    row["phase"] = _read_name(f"{where}.phase", record.get("phase", "prefill"), _PHASES)
    lora_id = record.get("lora_id")
    row["lora_id"] = check_count(
        f"{where}.lora_id",
        NO_ID if lora_id is None else lora_id,
        low=NO_ID,
        high=MAX_LORA_ID,
    )
    row["in_flight"] = check_flag(f"{where}.in_flight", record.get("in_flight", False))
    row["hold_reason"] = _read_name(
        f"{where}.hold_reason", record.get("hold_reason", "scheduled"), _HOLDS
    )
    _check_lengths(where, row)
    return row


def _read_name(where: str, value: object, names: Mapping[str, int]) -> int:
    if isinstance(value, str) and value in names:
        return int(names[value])
    raise ValueError(f"{where} must be one of {', '.join(names)}, got {value!r}")


def _read_points(where: str, value: object) -> list[int]:
    points = check_counts(where, value)
    for at, (one, other) in enumerate(zip(points, points[1:], strict=False)):
        if other <= one:
            raise ValueError(
                f"{where} must ascend, got {other} after {one} at entry {at + 1}"
            )
    return points


def _check_lengths(where: str, row: dict) -> None:
    """Refuses a row whose counts contradict each other or would pass int32."""
    prompt, computed = row["num_prompt_tokens"], row["num_computed_tokens"]
    if row["phase"] in (Phase.PREFILL, Phase.ENCODE) and computed >= prompt:
        raise ValueError(
            f"{where}.num_computed_tokens must be below num_prompt_tokens={prompt} "
            f"while the prompt is unfinished, got {computed}"
        )
    if prompt + row["num_output_tokens"] > MAX_COUNT:
        raise ValueError(
            f"{where}.num_output_tokens={row['num_output_tokens']} and "
            f"num_prompt_tokens={prompt} together are above {MAX_COUNT}"
        )


def _points_array(
    name: str, lists: list[list[int]], size: int, width: int | None
) -> np.ndarray:
    longest = max((len(points) for points in lists), default=0)
    if width is None:
        width = max(longest, 1)
    check_count(f"width of {name}", width, low=0)
    if longest > width:
        at = next(i for i, points in enumerate(lists) if len(points) > width)
        raise ValueError(
            f"requests[{at}].{name} has {len(lists[at])} points, "
            f"the table has room for {width}"
        )
    array = np.full((size, width), NO_ID, np.int32)
    for at, points in enumerate(lists):
        array[at, : len(points)] = points
    return array


def budget(
    *,
    max_num_batched_tokens: int | None,
    max_num_seqs: int = 256,
    chunk_unit_size: int = 64,
    max_context_length: int | None = None,
    strict: bool = True,
) -> Budget:
    """Builds a `Budget` from Python numbers; None means no limit.

    Args:
      max_num_batched_tokens: tokens of one step.
      max_num_seqs: rows of one step.
      chunk_unit_size: tokens; chunks cut by a limit end on its multiples.
      max_context_length: tokens of one chunk.
      strict: False accepts limits under which whole units never fit: a unit above
        them (the `jaxsched` rules then plan to the token) and a limit of 0.

    Raises:
      ValueError: naming the field, the value and what would be right.
    """
    limits = budget_limits(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        chunk_unit_size=chunk_unit_size,
        max_context_length=max_context_length,
        strict=strict,
    )
    return Budget(**{name: jnp.int32(value) for name, value in limits.items()})


def budget_limits(
    *,
    max_num_batched_tokens: int | None,
    max_num_seqs: int,
    chunk_unit_size: int,
    max_context_length: int | None,
    strict: bool,
) -> dict[str, int]:
    """The fields of `budget(...)` as Python ints: to stack many budgets."""
    tokens = {
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_context_length": max_context_length,
    }
    for name, value in tokens.items():
        low = int(strict)
        tokens[name] = UNLIMITED if value is None else check_count(name, value, low)
    check_count("max_num_seqs", max_num_seqs, low=1)
    check_count("chunk_unit_size", chunk_unit_size, low=1, high=MAX_UNIT)
    for name, value in tokens.items():
        if value < chunk_unit_size and strict:
            raise ValueError(
                f"chunk_unit_size={chunk_unit_size} is above {name}={value}, so no "
                f"step could reach a unit boundary: set {name} to at least "
                f"{chunk_unit_size} or chunk_unit_size to at most {value}"
            )
    return {
        **tokens,
        "max_num_seqs": max_num_seqs,
        "chunk_unit_size": chunk_unit_size,
    }
