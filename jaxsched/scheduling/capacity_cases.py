"""Admission cases as plain dictionaries, as the `plan` command reads and prints them.

As with planning cases, those with the same static configuration are padded to common
sizes, stacked, and answered by one vmapped call.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxsched.core.build import bucket_size, request_columns
from jaxsched.core.config import NO_ID, UNLIMITED, Rules
from jaxsched.core.host import check_flag
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.capacity import admit
from jaxsched.scheduling.capacity_build import ROW_FIELDS, capacity_columns
from jaxsched.scheduling.capacity_state import (
    CapacityConfig,
    CapacityError,
    CapacityResult,
    CapacityState,
    Verdict,
)
from jaxsched.scheduling.case_reading import (
    CaseError,
    check_ids,
    rank_adapters,
    read_record,
    refuse_unknown,
)

_CASE_KEYS = frozenset(("rules", "capacity", "requests"))
_POOL_KEYS = frozenset(
    ("free_cross_blocks", "total_cross_blocks", "free_state_slots")
    + ("total_state_slots", "two_step_lookahead")
)
_CAPACITY_KEYS = _POOL_KEYS | frozenset(
    ("policy", "max_num_requests", "block_size", "windows", "lora_pages")
    + ("prefix_deferral",)
)
_REQUIRED = ("policy", "max_num_requests", "block_size", "windows")
_SMALLEST_BUCKET = 16
_BATCH = 256
_FULL_BATCH = 4096
_UNLIMITED_WINDOW = {"window": None, "free_blocks": None}


class _Case(NamedTuple):
    """A case whose every value has been checked."""

    config: CapacityConfig
    table: dict[str, np.ndarray]
    state: dict[str, np.ndarray]


def answer_capacity_cases(cases: Sequence[Mapping[str, object]]) -> list[dict]:
    """Decides one admission pass for each case.

    Args:
      cases: inputs in the format of the `plan` command: `rules`, the pools under
        `capacity`, and `requests` in queue order.

    Returns:
      For each case `admitted`, `disagg_decode_init` and `preempted` (ids in output
      order), and beside them `reasons` (id and reason of every request that is not
      in) and `refused` (id, and in words what is too small for it); or
      `{"error": why}` where the rules raise.

    Raises:
      CaseError: naming the field, if a case cannot be read. No case is answered then.
    """
    read = [_read_case(index, case) for index, case in enumerate(cases)]
    groups: dict[tuple, list[int]] = {}
    for index, case in enumerate(read):
        rows, windows = case.state["allocated_blocks"].shape
        key = (case.config, windows, bucket_size(rows, _SMALLEST_BUCKET))
        groups.setdefault(key, []).append(index)
    answers: list[dict] = [{}] * len(read)
    for (config, _, size), members in groups.items():
        results = _admit_group(config, size, [read[index] for index in members])
        for index, result in zip(members, results, strict=True):
            answers[index] = _answer(cases[index], read[index], result)
    return answers


def _read_case(index: int, case: Mapping[str, object]) -> _Case:
    try:
        refuse_unknown(case, _CASE_KEYS)
        pools, requests = case.get("capacity"), case.get("requests")
        if not isinstance(pools, Mapping):
            raise ValueError(f"capacity must be a JSON object, got {pools!r}")
        if not isinstance(requests, list):
            raise ValueError(f"requests must be a list, got {requests!r}")
        unknown = sorted(set(pools) - _CAPACITY_KEYS)
        if unknown:
            raise ValueError(f"capacity has an unknown key {unknown[0]!r}")
        for name in _REQUIRED:
            if name not in pools:
                raise ValueError(f"capacity.{name} is missing")
        return _read(case, pools, requests)
    except ValueError as wrong:
        raise CaseError(index, str(wrong)) from wrong


def _read(case: Mapping, pools: Mapping, requests: list) -> _Case:
    records = [read_record(at, request) for at, request in enumerate(requests)]
    check_ids([request["id"] for request in requests])
    rank_adapters(records)
    _check_pages(records)
    holds = [{**_part(r, ROW_FIELDS), **_part(r, {"beam_width"})} for r in records]
    asks = [_part(r, set(r) - ROW_FIELDS) for r in records]
    # One program for many cases: whatever a case leaves out is switched off by data.
    config = CapacityConfig(
        rules=case.get("rules", Rules.JAXSCHED),
        policy=pools["policy"],
        prefix_deferral=True,
        lora=True,
    )
    deferral = check_flag("prefix_deferral", pools.get("prefix_deferral", False))
    table = request_columns(asks, num_rows=max(len(records), 1))
    windows = pools["windows"]
    if isinstance(windows, list) and windows:
        more = bucket_size(len(windows), 2) - len(windows)
        windows = windows + [_UNLIMITED_WINDOW] * more
        holds = [_with_windows(record, more) for record in holds]
    state = capacity_columns(
        holds,
        windows=windows,
        block_size=pools["block_size"],
        max_num_requests=pools["max_num_requests"],
        num_rows=max(len(records), 1),
        num_windows=len(pools["windows"]) if windows else 1,
        max_lora_pages=pools.get("lora_pages"),
        **{
            key: pools.get(key, False if key == "two_step_lookahead" else None)
            for key in _POOL_KEYS
        },
    )
    if not deferral:
        state["new_block_key"][:] = NO_ID
    return _Case(config, table, state)


def _part(record: Mapping, keys) -> dict:
    return {key: value for key, value in record.items() if key in keys}


def _with_windows(record: dict, more: int) -> dict:
    held = record.get("allocated_blocks")
    if not isinstance(held, list):
        return record
    return {**record, "allocated_blocks": held + [0] * more}


def _check_pages(records: Sequence[Mapping]) -> None:
    """An adapter has one size; its rows have to agree on it."""
    pages: dict[object, object] = {}
    for at, record in enumerate(records):
        adapter, size = record.get("lora_id"), record.get("lora_pages", 0)
        if adapter is None:
            if size:
                raise ValueError(
                    f"requests[{at}].lora_pages={size!r} needs a lora_id: the pages "
                    "are those of its adapter"
                )
        elif pages.setdefault(adapter, size) != size:
            raise ValueError(
                f"requests[{at}].lora_pages must be {pages[adapter]!r} as in the "
                f"other requests of its adapter, got {size!r}"
            )


@functools.cache
def _batch_admitter(config: CapacityConfig):
    admitter = jax.vmap(functools.partial(admit, config=config))
    # Compiled once, run a few times: most of the time would go into optimising it.
    quick = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    on_cpu = jax.default_backend() == "cpu"
    return jax.jit(admitter, compiler_options=quick if on_cpu else None)


def _admit_group(config: CapacityConfig, num_rows: int, cases: Sequence[_Case]):
    """Yields the result of each case as NumPy arrays."""
    empty = request_columns([], num_rows=num_rows)
    # Small tables always come in full batches: one program, however many there are.
    batch = min(_BATCH, bucket_size(len(cases), max(1, _FULL_BATCH // num_rows)))
    for start in range(0, len(cases), batch):
        part = cases[start : start + batch]
        tables = [case.table for case in part]
        tables += [tables[0]] * (batch - len(part))
        states = [case.state for case in part]
        states += [states[0]] * (batch - len(part))
        table = {name: _stack(name, tables, num_rows, empty[name]) for name in empty}
        state = {name: _stack(name, states, num_rows) for name in states[0]}
        results = _batch_admitter(config)(RequestTable(**table), CapacityState(**state))
        results = jax.device_get(results)
        for at in range(len(part)):
            yield jax.tree.map(lambda array, at=at: array[at], results)


_POINTS = frozenset(("requested_points", "snapshot_points"))
_PER_ROW = (ROW_FIELDS - {"beam_width"}) | {"allocated_blocks"}


def _stack(
    name: str,
    columns: Sequence[Mapping[str, np.ndarray]],
    num_rows: int,
    empty: np.ndarray | None = None,
) -> np.ndarray:
    """One field of many cases; rows are padded, points (never read here) cut off."""
    arrays = [np.asarray(column[name]) for column in columns]
    if name in _POINTS:
        arrays = [array[:, :1] for array in arrays]
    if empty is None and name not in _PER_ROW:
        return np.stack(arrays)
    fill = (NO_ID if name == "new_block_key" else 0) if empty is None else empty.flat[0]
    shape = (len(arrays), num_rows, *arrays[0].shape[1:])
    stacked = np.full(shape, fill, arrays[0].dtype)
    for at, array in enumerate(arrays):
        stacked[at, : array.shape[0]] = array
    return stacked


def _answer(case: Mapping, read: _Case, result: CapacityResult) -> dict:
    if result.error != CapacityError.NONE:
        return {"error": CapacityError(int(result.error)).message}
    ids = [request["id"] for request in case["requests"]]
    order = [int(row) for row in result.order if row != NO_ID]
    verdicts = [Verdict(int(verdict)) for verdict in result.verdict[: len(ids)]]
    return {
        "admitted": [ids[row] for row in order if result.admitted[row]],
        "disagg_decode_init": [
            ids[row] for row in order if result.disagg_decode_init[row]
        ],
        "preempted": [ids[row] for row in result.preemption_order if row != NO_ID],
        "reasons": [
            {"id": name, "reason": verdict.name.lower()}
            for name, verdict in zip(ids, verdicts, strict=True)
            if verdict != Verdict.ADMITTED
        ],
        "refused": [
            {"id": ids[row], "why": describe_refusal(read.state, result, row)}
            for row, verdict in enumerate(verdicts)
            if verdict == Verdict.TOO_LARGE
        ],
    }


def describe_refusal(
    state: Mapping[str, np.ndarray], result: CapacityResult, row: int
) -> str:
    """What is too small for a row whose verdict is TOO_LARGE, with the right number.

    Args:
      state: the fields of the `CapacityState` of the pass, on the host.
      result: the answer of the pass, on the host.
      row: the row.
    """
    pools = [
        (f"the block pool of window {_tokens(window)}", need, total, "total_blocks")
        for window, need, total in zip(
            state["window"],
            result.required_blocks[row],
            state["total_blocks"],
            strict=True,
        )
    ]
    if state["has_cross_pool"]:
        need, total = result.required_cross_blocks[row], state["total_cross_blocks"]
        pools.append(("the cross-attention pool", need, total, "total_cross_blocks"))
    need, total = result.required_state_slots[row], state["total_state_slots"]
    pools.append(("the pool of state slots", need, total, "total_state_slots"))
    pages = state["lora_pages"][row]
    pools.append(("the adapter pool", pages, state["max_lora_pages"], "lora_pages"))
    short = [
        f"{name} has {total}, it needs {need}: set {field} to at least {need}"
        for name, need, total, field in pools
        if need > total
    ]
    return "; ".join(short) + ", or send a shorter request"


def _tokens(window: int) -> str:
    return "without limit" if window == UNLIMITED else str(window)
