"""Host-side constructor of `CapacityState`, with every value checked."""

from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxsched.core.build import MAX_UNIT, bucket_size
from jaxsched.core.config import MAX_COUNT, NO_ID, UNLIMITED
from jaxsched.core.host import check_count, check_counts, check_flag
from jaxsched.scheduling.capacity_state import MAX_POOL, CapacityState

_ROW_COUNTS = {
    "allocated_cross_blocks": 0,
    "allocated_state_slots": 0,
    "new_state_slots": 0,
    "num_referenced_blocks": 0,
    "lora_pages": 0,
}
ROW_FIELDS = frozenset(("allocated_blocks", "new_block_key", *_ROW_COUNTS))
"""Keys of a record that describe what a row holds or takes."""

_WINDOW_KEYS = frozenset(("window", "free_blocks", "total_blocks"))


def capacity_state(
    records: Iterable[Mapping[str, object]] = (),
    *,
    windows: Sequence[Mapping[str, object]],
    block_size: int,
    max_num_requests: int,
    num_rows: int | None = None,
    max_lora_pages: int | None = None,
    free_cross_blocks: int | None = None,
    total_cross_blocks: int | None = None,
    free_state_slots: int | None = None,
    total_state_slots: int | None = None,
    two_step_lookahead: bool = False,
) -> CapacityState:
    """Builds a `CapacityState` from Python numbers.

    Args:
      records: one mapping a row, in the table's order, with any of the per-row fields
        of `CapacityState`, and `beam_width` (1) where blocks are held; absent: 0.
      windows: one mapping a window: `window` tokens (None: all), `free_blocks` (None:
        no limit), and `total_blocks` (default: free and held ones together).
      block_size: tokens.
      max_num_requests: rows that may be in at once.
      num_rows: R; default the next power of two.
      max_lora_pages: None: no limit.
      free_cross_blocks: None: there is no pool for cross attention.
      total_cross_blocks: default: free and held ones together.
      free_state_slots: None: no limit.
      total_state_slots: default: free and held ones together.
      two_step_lookahead: whether a decode reserves its next two steps.

    Raises:
      ValueError: naming the field, the value and what would be right.
    """
    columns = capacity_columns(
        list(records),
        windows=windows,
        block_size=block_size,
        max_num_requests=max_num_requests,
        num_rows=num_rows,
        max_lora_pages=max_lora_pages,
        free_cross_blocks=free_cross_blocks,
        total_cross_blocks=total_cross_blocks,
        free_state_slots=free_state_slots,
        total_state_slots=total_state_slots,
        two_step_lookahead=two_step_lookahead,
    )
    return CapacityState(**{name: jnp.asarray(v) for name, v in columns.items()})


def capacity_columns(
    records: Sequence[Mapping[str, object]],
    *,
    windows: Sequence[Mapping[str, object]],
    block_size: int,
    max_num_requests: int,
    num_rows: int | None,
    num_windows: int | None = None,
    max_lora_pages: int | None,
    free_cross_blocks: int | None,
    total_cross_blocks: int | None,
    free_state_slots: int | None,
    total_state_slots: int | None,
    two_step_lookahead: bool,
) -> dict[str, np.ndarray]:
    """The fields of `capacity_state(...)` as NumPy arrays: to stack many states."""
    size = bucket_size(len(records)) if num_rows is None else num_rows
    check_count("num_rows", size, low=1)
    if len(records) > size:
        raise ValueError(f"{len(records)} records do not fit into num_rows={size}")
    if isinstance(windows, str | Mapping) or not isinstance(windows, Sequence):
        raise ValueError(f"windows must be a list, got {windows!r}")
    if not windows:
        raise ValueError("windows must have at least one entry, got []")
    rows = [_read_row(at, record, len(windows)) for at, record in enumerate(records)]
    columns = _row_columns(rows, size, len(windows))
    columns |= _window_columns(windows, columns["allocated_blocks"], rows)
    cross = _pool("cross_blocks", free_cross_blocks, total_cross_blocks, columns)
    slots = _pool("state_slots", free_state_slots, total_state_slots, columns)
    has_cross = free_cross_blocks is not None
    scalars = {
        "free_cross_blocks": cross[0] if has_cross else 0,
        "total_cross_blocks": cross[1] if has_cross else 0,
        "free_state_slots": slots[0],
        "total_state_slots": slots[1],
        "max_lora_pages": _limit("max_lora_pages", max_lora_pages),
        "num_windows": len(windows) if num_windows is None else num_windows,
        "block_size": check_count("block_size", block_size, low=1, high=MAX_UNIT),
        "max_num_requests": check_count("max_num_requests", max_num_requests, low=1),
    }
    columns |= {name: np.int32(value) for name, value in scalars.items()}
    columns["has_cross_pool"] = np.bool_(has_cross)
    columns["two_step_lookahead"] = np.bool_(
        check_flag("two_step_lookahead", two_step_lookahead)
    )
    return columns


def _limit(field: str, value: object, low: int = 0) -> int:
    return UNLIMITED if value is None else check_count(field, value, low, MAX_POOL)


def _read_row(at: int, record: Mapping[str, object], num_windows: int) -> dict:
    where = f"requests[{at}]"
    held = record.get("allocated_blocks")
    held = [0] * num_windows if held is None else held
    held = check_counts(f"{where}.allocated_blocks", held)
    if len(held) != num_windows:
        raise ValueError(
            f"{where}.allocated_blocks must have one entry for each of the "
            f"{num_windows} windows, got {held}"
        )
    beams = record.get("beam_width", 1)
    beams = check_count(f"{where}.beam_width", beams, low=1, high=MAX_POOL)
    row = {"allocated_blocks": held, "beam_width": beams}
    for blocks in held:
        if blocks * beams > MAX_POOL:
            raise ValueError(
                f"{where}.allocated_blocks must hold at most {MAX_POOL} blocks in all "
                f"beams together, got {held} with beam_width={beams}"
            )
    for name, default in _ROW_COUNTS.items():
        value = record.get(name, default)
        row[name] = check_count(f"{where}.{name}", value, high=MAX_POOL)
    key = record.get("new_block_key")
    key = NO_ID if key is None else key
    row["new_block_key"] = check_count(f"{where}.new_block_key", key, low=NO_ID)
    return row


def _row_columns(rows: list[dict], size: int, num_windows: int) -> dict:
    columns = {name: np.zeros(size, np.int32) for name in _ROW_COUNTS}
    columns["new_block_key"] = np.full(size, NO_ID, np.int32)
    columns["allocated_blocks"] = np.zeros((size, num_windows), np.int32)
    for name, column in columns.items():
        if rows:
            column[: len(rows)] = [row[name] for row in rows]
    return columns


def _window_columns(
    windows: Sequence[Mapping[str, object]], held: np.ndarray, rows: list[dict]
) -> dict[str, np.ndarray]:
    beams = np.ones(held.shape[0], np.int64)
    beams[: len(rows)] = [row["beam_width"] for row in rows]
    columns = {name: np.zeros(len(windows), np.int32) for name in _WINDOW_KEYS}
    for at, window in enumerate(windows):
        where = f"windows[{at}]"
        if not isinstance(window, Mapping):
            raise ValueError(f"{where} must be an object, got {window!r}")
        unknown = sorted(set(window) - _WINDOW_KEYS)
        if unknown:
            raise ValueError(f"{where} has an unknown field {unknown[0]!r}")
        for name in ("window", "free_blocks"):
            if name not in window:
                raise ValueError(f"{where}.{name} is missing; null means no limit")
        tokens = window["window"]
        if tokens is not None:
            check_count(f"{where}.window", tokens, low=1, high=MAX_COUNT)
        free = _limit(f"{where}.free_blocks", window["free_blocks"])
        together = free + int((held[:, at] * beams).sum())
        total = _total(
            f"{where}.total_blocks", free, window.get("total_blocks"), together
        )
        columns["window"][at] = UNLIMITED if tokens is None else tokens
        columns["free_blocks"][at] = free
        columns["total_blocks"][at] = total
    return columns


def _pool(what: str, free: object, total: object, columns: dict) -> tuple[int, int]:
    amount = _limit(f"free_{what}", free)
    together = amount + int(columns[f"allocated_{what}"].sum(dtype=np.int64))
    return amount, _total(f"total_{what}", amount, total, together)


def _total(field: str, free: int, total: object, together: int) -> int:
    if free == UNLIMITED:
        return UNLIMITED
    if total is None:
        return min(together, MAX_POOL)
    check_count(field, total, high=MAX_POOL)
    if total < free:
        raise ValueError(f"{field} must be at least the {free} free ones, got {total}")
    return total
