"""Planning cases as plain dictionaries, as the `plan` command reads and prints them.

Cases are answered in batches: those with the same static configuration are padded to
common sizes, stacked, and planned by one vmapped call, so thousands of cases cost a
handful of compilations.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxsched.core.build import bucket_size, budget_limits, request_columns
from jaxsched.core.config import (
    NO_ID,
    ChunkingPolicy,
    PlanError,
    Reason,
    Rules,
    SchedulerConfig,
)
from jaxsched.core.host import check_count, check_flag
from jaxsched.core.plan import Budget, Plan
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.case_reading import (
    CaseError,
    check_ids,
    rank_adapters,
    read_record,
    refuse_unknown,
)
from jaxsched.scheduling.scheduler import schedule
from jaxsched.scheduling.snapshots import list_snapshot_points

_CASE_KEYS = frozenset(
    ("rules", "chunking_policy", "max_num_seqs", "max_num_batched_tokens")
    + ("max_context_length", "chunk_unit_size", "encoder_decoder", "requests")
    + ("snapshot_mode", "max_emit_points")
)
_POINT_KEYS = {
    "num_prompt_tokens": "num_prompt_tokens",
    "enable_prefix_caching": "enable_prefix_caching",
    "snapshot_interval": "interval",
    "offsets_from_start": "from_start",
    "offsets_from_end": "from_end",
    "snapshot_points": "requested",
    "save_last": "save_last",
    "block_size": "block_size",
}
_POINT_FIELDS = ("snapshot_points", "requested_points")
_SMALLEST_BUCKET = 256
_BATCH = 256


def answer_points_cases(cases: Sequence[Mapping[str, object]]) -> list[list[int]]:
    """The published snapshot points of the prompt of each case.

    Raises:
      CaseError: naming the key, if it is unknown or its value out of range.
    """
    answers = []
    for index, case in enumerate(cases):
        try:
            answers.append(_points(case))
        except ValueError as wrong:
            raise CaseError(index, str(wrong)) from wrong
    return answers


def _points(case: Mapping[str, object]) -> list[int]:
    refuse_unknown(case, _POINT_KEYS)
    if "num_prompt_tokens" not in case:
        raise ValueError("num_prompt_tokens is missing")
    for flag in ("enable_prefix_caching", "save_last"):
        check_flag(flag, case.get(flag, False))
    return list_snapshot_points(**{_POINT_KEYS[key]: case[key] for key in case})


def answer_plan_cases(cases: Sequence[Mapping[str, object]]) -> list[dict]:
    """Plans one step for each case.

    Args:
      cases: inputs in the format of the `plan` command: limits, policy and `requests`
        in queue order.

    Returns:
      For each case `encode`, `decode` (ids in output order) and `prefill`
      (`{id, num_scheduled_tokens, num_draft_tokens}` in output order), and beside them
      `reasons` (id and reason of every row that got nothing), `snapshots` (id and
      position where a chunk ends on a point), `emit` (id and inner positions) and
      `num_batched_tokens`; or `{"error": why}` where the rules raise.

    Raises:
      CaseError: naming the field, if a case cannot be read. No case is answered then.
    """
    read = [_read_case(index, case) for index, case in enumerate(cases)]
    groups: dict[tuple, list[int]] = {}
    for index, case in enumerate(read):
        size = _padded_rows(case.num_rows)
        groups.setdefault((case.config, size), []).append(index)
    answers: list[dict] = [{}] * len(read)
    for (config, size), members in groups.items():
        plans = _plan_group(config, size, [read[index] for index in members])
        for index, plan in zip(members, plans, strict=True):
            answers[index] = _answer(cases[index], plan)
    return answers


class _Case(NamedTuple):
    """A case whose every value has been checked."""

    config: SchedulerConfig
    limits: dict[str, int]
    columns: dict[str, np.ndarray]

    @property
    def num_rows(self) -> int:
        return self.columns["phase"].shape[0]


def _padded_rows(num_rows: int) -> int:
    """Few distinct sizes: a compilation costs more than rows of padding."""
    return bucket_size(num_rows, _SMALLEST_BUCKET)


def _read_case(index: int, case: Mapping[str, object]) -> _Case:
    try:
        refuse_unknown(case, _CASE_KEYS)
        requests = case.get("requests")
        if not isinstance(requests, list):
            raise ValueError(f"requests must be a list, got {requests!r}")
        records = [read_record(at, request) for at, request in enumerate(requests)]
        check_ids([request["id"] for request in requests])
        rank_adapters(records)
        config = _config(case, requests)
        limits = _limits(case, config)
        columns = request_columns(records, num_rows=max(len(records), 1))
    except ValueError as wrong:
        raise CaseError(index, str(wrong)) from wrong
    return _Case(config, limits, columns)


def _config(case: Mapping[str, object], requests: Sequence[Mapping]) -> SchedulerConfig:
    encodes = check_flag("encoder_decoder", case.get("encoder_decoder", False))
    # A case without encoder requests plans the same either way: one program fewer.
    encodes &= any(request.get("phase") == "encode" for request in requests)
    return SchedulerConfig(
        rules=case.get("rules", Rules.JAXSCHED),
        chunking_policy=case.get("chunking_policy", ChunkingPolicy.FORCE_CHUNK),
        snapshot_mode=case.get("snapshot_mode", "cut"),
        max_emit_points=case.get("max_emit_points", 8),
        encoder_decoder=encodes,
    )


def _limits(case: Mapping[str, object], config: SchedulerConfig) -> dict[str, int]:
    for key in ("max_num_seqs", "chunk_unit_size"):
        if key not in case:
            raise ValueError(f"{key} is missing")
    if "max_num_batched_tokens" not in case:
        raise ValueError("max_num_batched_tokens is missing; null means unlimited")
    tokens = case["max_num_batched_tokens"]
    longest = case.get("max_context_length", tokens)
    if config.rules == Rules.JAXSCHED:
        for key, value in (
            ("max_num_batched_tokens", tokens),
            ("max_context_length", longest),
        ):
            if value is not None:
                check_count(key, value, low=1)
    return budget_limits(
        max_num_batched_tokens=tokens,
        max_num_seqs=case["max_num_seqs"],
        chunk_unit_size=case["chunk_unit_size"],
        max_context_length=longest,
        strict=False,
    )


@functools.cache
def _batch_planner(config: SchedulerConfig):
    planner = jax.vmap(functools.partial(schedule, config=config))
    # Compiled once, run a few times: most of the time would go into optimising it.
    quick = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    on_cpu = jax.default_backend() == "cpu"
    return jax.jit(planner, compiler_options=quick if on_cpu else None)


def _plan_group(config: SchedulerConfig, num_rows: int, cases: Sequence[_Case]):
    """Yields the plan of each case as NumPy arrays."""
    widths = {
        name: bucket_size(max(case.columns[name].shape[1] for case in cases), 8)
        for name in _POINT_FIELDS
    }
    padding = request_columns([], num_rows=num_rows)
    batch = min(_BATCH, bucket_size(len(cases)))
    for start in range(0, len(cases), batch):
        part = cases[start : start + batch]
        columns = {
            name: _stack(name, empty, part, batch, widths.get(name))
            for name, empty in padding.items()
        }
        limits = {
            name: np.array(
                [case.limits[name] for case in part]
                + [part[0].limits[name]] * (batch - len(part)),
                np.int32,
            )
            for name in part[0].limits
        }
        planner = _batch_planner(config)
        plans = jax.device_get(planner(RequestTable(**columns), Budget(**limits)))
        for at in range(len(part)):
            yield jax.tree.map(lambda array, at=at: array[at], plans)


def _stack(
    name: str, empty: np.ndarray, cases: Sequence[_Case], batch: int, width: int | None
) -> np.ndarray:
    """One field of many tables, padded to common sizes."""
    fill = empty.flat[0]
    shape = (batch, *empty.shape[:1], *([] if width is None else [width]))
    stacked = np.full(shape, fill, empty.dtype)
    for at, case in enumerate(cases):
        column = case.columns[name]
        stacked[(at, *(slice(size) for size in column.shape))] = column
    return stacked


def _answer(case: Mapping[str, object], plan: Plan) -> dict:
    if plan.error != PlanError.NONE:
        return {"error": PlanError(int(plan.error)).message}
    ids = [request["id"] for request in case["requests"]]
    order = [int(row) for row in plan.order if row != NO_ID]
    prefills = [row for row in order if plan.prefill_mask[row]]
    return {
        "encode": [ids[row] for row in order if plan.encode_mask[row]],
        "prefill": [
            {
                "id": ids[row],
                "num_scheduled_tokens": int(plan.num_scheduled_tokens[row]),
                "num_draft_tokens": int(plan.num_draft_tokens[row]),
            }
            for row in prefills
        ],
        "decode": [ids[row] for row in order if plan.decode_mask[row]],
        "reasons": [
            {"id": ids[row], "reason": Reason(int(plan.reason[row])).name.lower()}
            for row in range(len(ids))
            if plan.reason[row] != Reason.SCHEDULED
        ],
        "snapshots": [
            {"id": ids[row], "position": int(plan.snapshot_point[row])}
            for row in prefills
            if plan.snapshot_point[row] != NO_ID
        ],
        "emit": [
            {"id": ids[row], "positions": _present(plan.emit_points[row])}
            for row in prefills
            if _present(plan.emit_points[row])
        ],
        "num_batched_tokens": int(plan.num_batched_tokens),
    }


def _present(points: np.ndarray) -> list[int]:
    return [int(point) for point in points if point != NO_ID]
