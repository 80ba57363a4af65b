"""Runs `jaxsched.schedule` on thousands of plain cases and compares whole plans.

Cases are `oracles.records.Case`. Those of one static configuration are stacked and
planned by one vmapped call, so a configuration compiles once. The fast tests share
one shape (`ROWS` rows, `POINTS` points, `BATCH` tables), hence one compilation each.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np

import jaxsched
from oracles import planner, records
from oracles.planner_advance import advance

ROWS, POINTS, BATCH = 16, 8, 1024

_ROW_FIELDS = {
    "request_id": "id",
    "num_prompt_tokens": "num_prompt_tokens",
    "num_computed_tokens": "num_computed_tokens",
    "num_cached_tokens": "num_cached_tokens",
    "num_reusable_tokens": "num_reusable_tokens",
    "num_output_tokens": "num_output_tokens",
    "max_new_tokens": "max_new_tokens",
    "num_draft_tokens": "num_draft_tokens",
    "num_encoder_tokens": "num_encoder_tokens",
    "beam_width": "beam_width",
    "lora_id": "lora_id",
    "in_flight": "in_flight",
    "hold_reason": "hold_reason",
    "snapshot_interval": "snapshot_interval",
}
_BUDGET_FIELDS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "chunk_unit_size",
    "max_context_length",
)
PLAN_FIELDS = tuple(field.name for field in dataclasses.fields(jaxsched.Plan))


def quick_compile(function):
    """`jax.jit` with the optimiser off: the tests' programs run only a few times."""
    return jax.jit(
        function,
        compiler_options={
            "xla_backend_optimization_level": 0,
            "xla_llvm_disable_expensive_passes": True,
        },
    )


def config_of(case):
    """The static configuration of a case."""
    return jaxsched.SchedulerConfig(
        rules=case.rules,
        chunking_policy=case.chunking_policy,
        snapshot_mode=case.snapshot_mode,
        max_emit_points=case.max_emit_points,
        encoder_decoder=case.encoder_decoder,
        group_by_lora=case.group_by_lora,
    )


@functools.cache
def batch_planner(config, compiler=quick_compile):
    """The vmapped planner of one configuration."""
    return compiler(jax.vmap(functools.partial(jaxsched.schedule, config=config)))


def stack_tables(cases, num_rows=ROWS, num_points=POINTS):
    """A `RequestTable` of NumPy arrays with a leading axis, one entry a case."""
    shape = (len(cases), num_rows)
    empty = records.Row()
    at, rows = [], []
    for index, case in enumerate(cases):
        at += range(index * num_rows, index * num_rows + len(case.rows))
        rows += case.rows
    columns = {}
    for field, name in _ROW_FIELDS.items():
        column = np.full(shape, getattr(empty, name), np.int32)
        column.flat[at] = [getattr(row, name) for row in rows]
        columns[field] = column
    columns["in_flight"] = columns["in_flight"].astype(bool)
    phase = np.zeros(shape, np.int32)
    phase.flat[at] = [records.PHASES.index(row.phase) for row in rows]
    points = np.full((*shape, num_points), records.NO_ID, np.int32)
    flat = points.reshape(-1, num_points)
    for place, row in zip(at, rows, strict=True):
        flat[place, : len(row.snapshot_points)] = row.snapshot_points
    return jaxsched.RequestTable(
        **columns,
        phase=phase,
        priority=np.zeros(shape, np.int32),
        arrival=np.zeros(shape, np.int32),
        requested_points=np.full((*shape, 1), records.NO_ID, np.int32),
        snapshot_points=points,
    )


def stack_budgets(cases):
    """A `Budget` of NumPy arrays with a leading axis, one entry a case."""
    return jaxsched.Budget(
        **{
            field: np.array([getattr(case, field) for case in cases], np.int32)
            for field in _BUDGET_FIELDS
        }
    )


def fill_batch(stacked, batch=BATCH):
    """Repeats the last entry of the leading axis up to the size of a full batch."""

    def fill(array):
        missing = batch - array.shape[0]
        return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])

    return jax.tree.map(fill, stacked)


def run_cases(
    cases,
    num_rows=ROWS,
    num_points=POINTS,
    batch=BATCH,
    compiler=quick_compile,
    row_walk="parallel",
):
    """Plans of NumPy arrays for cases of one configuration, stacked in their order."""
    config = dataclasses.replace(config_of(cases[0]), row_walk=row_walk)
    program = batch_planner(config, compiler)
    plans = []
    for start in range(0, len(cases), batch):
        part = cases[start : start + batch]
        stacked = stack_tables(part, num_rows, num_points), stack_budgets(part)
        plan = jax.device_get(program(*fill_batch(stacked, batch)))
        plans.append(jax.tree.map(lambda array, n=len(part): array[:n], plan))
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *plans)


def expected_plans(cases, num_rows=ROWS):
    """What the oracle answers, stacked like `run_cases`; padding rows included."""
    answers = [planner.plan(case) for case in cases]
    emit_columns = len(answers[0].emit_points[0])
    padding = {
        "emit_points": [records.NO_ID] * emit_columns,
        "snapshot_point": records.NO_ID,
        "order": records.NO_ID,
        "reason": records.EMPTY_ROW,
    }
    stacked = {}
    for field in PLAN_FIELDS:
        values = [getattr(answer, field) for answer in answers]
        if isinstance(values[0], list):
            fill = padding.get(field, False if field.endswith("mask") else 0)
            values = [v + [fill] * (num_rows - len(v)) for v in values]
        stacked[field] = np.array(values)
    return stacked


def assert_same_plans(cases, num_rows=ROWS, num_points=POINTS, batch=BATCH, **options):
    """Holds every field of every plan against the oracle; shows the smallest miss.

    Returns the plans of the last configuration, stacked.
    """
    groups = {}
    for case in cases:
        groups.setdefault(config_of(case), []).append(case)
    for config, members in groups.items():
        plans = run_cases(members, num_rows, num_points, batch, **options)
        wanted = expected_plans(members, num_rows)
        wrong = np.zeros(len(members), bool)
        for field in PLAN_FIELDS:
            differs = getattr(plans, field) != wanted[field]
            wrong |= differs.reshape(len(members), -1).any(axis=1)
        if wrong.any():
            report_smallest(config, members, plans, wanted, np.flatnonzero(wrong))
    return plans


def report_smallest(config, cases, plans, wanted, wrong):
    """Fails with the wrong case that has the fewest rows and the smallest numbers."""
    worst = min(wrong, key=lambda i: (len(cases[i].rows), len(repr(cases[i]))))
    size = len(cases[worst].rows)
    lines = [f"{len(wrong)} of {len(cases)} plans differ under {config}"]
    lines.append(repr(cases[worst]))
    for field in PLAN_FIELDS:
        got, want = getattr(plans, field)[worst], wanted[field][worst]
        if np.any(got != want):
            got, want = (v[:size] if v.ndim else v for v in (got, want))
            lines.append(f"{field}: got {got.tolist()}, oracle says {want.tolist()}")
    raise AssertionError("\n".join(lines))


def bucket_of(case):
    """Shape that holds a case: the shared one, or one for many rows."""
    if len(case.rows) <= ROWS:
        return ROWS, POINTS, BATCH
    return 128, POINTS, 4


def plan_one(case):
    """The implementation's answer to one case, as a `records.Answer`.

    Accepts a `records.Case` or the `input` of a case file. Also holds the oracle's
    answer against it, so a scenario checks both.
    """
    if not isinstance(case, records.Case):
        case = records.read_case(case)
    num_rows, num_points, batch = bucket_of(case)
    plans = assert_same_plans([case], num_rows, num_points, batch)
    return to_answers([case], plans)[0]


def to_answers(cases, plans):
    """Stacked plans as a list of `records.Answer`, padding rows cut off."""
    columns = [getattr(plans, field).tolist() for field in PLAN_FIELDS]
    answers = []
    for case, *values in zip(cases, *columns, strict=True):
        size = len(case.rows)
        cut = [v[:size] if isinstance(v, list) else v for v in values]
        answers.append(records.Answer(**dict(zip(PLAN_FIELDS, cut, strict=True))))
    return answers


def product_of(**choices):
    """Every combination of keyword choices, as dictionaries."""
    names = list(choices)
    for values in itertools.product(*choices.values()):
        yield dict(zip(names, values, strict=True))


def ask(rows, policy, tokens, unit=1, rules="tensorrt_llm", **limits):
    """A case in few words; `seqs`, `context` and `mode` default to no limit and cut."""
    return records.Case(
        rules=rules,
        chunking_policy=policy,
        max_num_seqs=limits.pop("seqs", 128),
        max_num_batched_tokens=tokens,
        max_context_length=limits.pop("context", tokens),
        chunk_unit_size=unit,
        encoder_decoder=True,
        snapshot_mode=limits.pop("mode", "cut"),
        max_emit_points=limits.pop("emit", 8),
        group_by_lora=True,
        rows=[dataclasses.replace(row, id=i) for i, row in enumerate(rows)],
        **limits,
    )


def sizes(case):
    """What each row of a case gets in one step, 0 for nothing."""
    return plan_one(case).num_scheduled_tokens


def trace(case, steps):
    """(case, answer) of consecutive steps; ends early when nothing is left to run."""
    for _ in range(steps):
        answer = plan_one(case)
        yield case, answer
        if not answer.num_seqs:
            return
        case = advance(case, answer)


def chunk_ends(case, steps=64, row=0):
    """Cursors of one prefill after each step that moved it, and its filed points."""
    ends, filed = [], []
    for now, answer in trace(case, steps):
        if now.rows[row].phase != "prefill":
            break
        size = answer.num_scheduled_tokens[row]
        if size == 0:
            break
        ends.append(now.rows[row].num_computed_tokens + size)
        if answer.snapshot_point[row] != records.NO_ID:
            filed.append(answer.snapshot_point[row])
    return ends, filed
