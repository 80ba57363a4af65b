"""A step's layout is the plain one, request by request, whatever the mix."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched import NO_ID, Plan, request_table
from jaxsched.core.checks import check_plan
from jaxsched.models.batch import StepShape, Work, build_batch, work_from_plan
from oracles.models_batch import lay_out

ROWS, LENGTH, BLOCKS, POINTS, SLOTS = 6, 64, 5, 3, 40
build = jax.jit(build_batch, static_argnames=("shape", "num_slots"))


def random_requests(draw):
    requests = []
    for row in range(ROWS):
        start = draw.choice([0, 4, 8, draw.randint(0, 30)])
        decode = draw.random() < 0.3
        count = 1 if decode else draw.choice([0, 1, 4, draw.randint(1, 20)])
        places = draw.sample(range(start + 1, start + count + 4), POINTS)
        points = [
            (p, draw.choice([NO_ID, 10 + 3 * row + i])) for i, p in enumerate(places)
        ]
        requests.append(
            dict(
                start=start,
                count=count,
                decode=decode,
                last=not decode and draw.random() < 0.4,
                load=1 + row if start else 0,
                store=1 + row,
                points=points,
            )
        )
    return requests


def as_work(requests, tokens, tables):
    def column(name, dtype=np.int32):
        return np.array([r[name] for r in requests], dtype)

    pairs = np.array([r["points"] for r in requests], np.int32)
    return Work(
        token_ids=tokens,
        start=column("start"),
        count=column("count"),
        is_decode=column("decode", bool),
        is_last=column("last", bool),
        block_tables=tables,
        load_slots=column("load"),
        store_slots=column("store"),
        snapshot_points=pairs[..., 0],
        snapshot_slots=pairs[..., 1],
    )


TOKENS = np.random.default_rng(0).integers(1, 90, (ROWS, LENGTH), np.int32)
TABLES = np.arange(ROWS * BLOCKS, dtype=np.int32).reshape(ROWS, BLOCKS)


@pytest.mark.parametrize(
    "shape",
    [
        StepShape(chunk_size=4, num_cells=24, num_rows=6),
        StepShape(chunk_size=5, num_cells=5, num_rows=1, num_writes=30, num_logits=6),
        StepShape(chunk_size=4, num_cells=0, num_rows=6),
    ],
)
def test_layout_of_random_steps(shape):
    draw = random.Random(7)
    for _ in range(60):
        requests = random_requests(draw)
        if not shape.num_cells:
            requests = [r | {"count": r["count"] * r["decode"]} for r in requests]
        right, missed = lay_out(
            requests, shape.chunk_size, shape.num_cells, shape.num_rows
        )
        got = build(as_work(requests, TOKENS, TABLES), shape, SLOTS)
        got = jax.tree.map(np.asarray, got)  # one copy, not one for each number
        check(got, right, requests, shape)
        assert int(got.num_missed) == missed


def check(got, right, requests, shape):
    cells = right["cells"]
    for index in range(shape.num_cells):
        if index >= len(cells):
            assert int(got.cell_fill[index]) == 0
            assert not bool(got.cell_is_first[index])
            continue
        cell = cells[index]
        found = {
            "start": int(got.cell_start[index]),
            "first_fresh": int(got.cell_first_fresh[index]),
            "fill": int(got.cell_fill[index]),
            "is_first": bool(got.cell_is_first[index]),
            "load": int(got.cell_load_slot[index]),
            "owner": int(got.cell_tables[index, 0]) // BLOCKS,
        }
        assert found == cell
        fill = slice(0, cell["fill"])
        own = TOKENS[cell["owner"], cell["start"] :][fill]
        np.testing.assert_array_equal(got.cell_tokens[index][fill], own)
    for index in range(shape.num_rows):
        if index >= len(right["rows"]):
            assert not bool(got.row_mask[index])
            assert int(got.row_store_slot[index]) == SLOTS
            continue
        owner, position, load, store = right["rows"][index]
        assert bool(got.row_mask[index])
        assert int(got.row_tokens[index]) == TOKENS[owner, position]
        assert int(got.row_positions[index]) == position
        slots = (int(got.row_load_slot[index]), int(got.row_store_slot[index]))
        assert slots == (load, store)
        assert int(got.row_tables[index, 0]) == owner * BLOCKS
    writes = zip(
        got.write_cell, got.write_count, got.write_slot, got.write_plain, strict=True
    )
    found = [(int(c), int(n), int(s), bool(p)) for c, n, s, p in writes]
    assert [write for write in found if write[2] < SLOTS] == right["writes"]
    for row, request in enumerate(requests):
        check_logits(got, right, request, row, shape)


def check_logits(got, right, request, row, shape):
    """The row's logits come from its last token's column, or from its own lane."""
    at = int(got.logit_row[row])
    lanes = [owner for owner, *_ in right["rows"]]
    columns = len(got.logit_columns)
    if request["decode"] and request["count"]:
        assert at == (columns + lanes.index(row) if row in lanes else NO_ID)
        return
    cells = [index for index, cell in enumerate(right["cells"]) if cell["owner"] == row]
    last = request["start"] + request["count"] - 1
    ended = [
        c for c in cells if right["cells"][c]["start"] == last - last % shape.chunk_size
    ]
    if not (request["last"] and request["count"] and ended):
        assert at == NO_ID
        return
    column = ended[0] * shape.chunk_size + last % shape.chunk_size
    assert int(got.logit_columns[at]) == column


def test_work_of_a_plan():
    """A plan's chunks, points and decodes reach the right fields."""
    table = request_table(
        [
            {"num_prompt_tokens": 20},
            {"num_prompt_tokens": 9, "num_computed_tokens": 9, "phase": "decode"},
            {"num_prompt_tokens": 12, "num_computed_tokens": 4},
        ],
        num_rows=3,
    )

    def column(*values):
        return jnp.array(values, jnp.int32)

    plan = Plan(
        num_scheduled_tokens=column(20, 1, 8),
        num_draft_tokens=column(0, 0, 0),
        is_last_chunk=jnp.array([True, False, True]),
        snapshot_point=column(20, NO_ID, NO_ID),
        emit_points=column((6, 13), (NO_ID, NO_ID), (NO_ID, NO_ID)),
        prefill_mask=jnp.array([True, False, True]),
        decode_mask=jnp.array([False, True, False]),
        encode_mask=jnp.zeros(3, bool),
        preempted_mask=jnp.zeros(3, bool),
        order=column(0, 1, 2),
        reason=column(0, 0, 0),
        num_seqs=jnp.int32(3),
        num_batched_tokens=jnp.int32(29),
        error=jnp.int32(0),
    )
    check_plan(plan, table)
    width = plan.emit_points.shape[1] + 1
    slots = jnp.arange(3 * width, dtype=jnp.int32).reshape(3, width) + 10
    work = work_from_plan(
        plan,
        table,
        token_ids=jnp.zeros((3, 32), jnp.int32),
        block_tables=jnp.zeros((3, 2), jnp.int32),
        load_slots=jnp.array([0, 2, 3], jnp.int32),
        store_slots=jnp.array([1, 2, 3], jnp.int32),
        snapshot_slots=slots,
    )
    assert work.start.tolist() == [0, 9, 4]
    assert work.count.tolist() == [20, 1, 8]
    assert work.is_decode.tolist() == [False, True, False]
    assert work.is_last.tolist() == [True, False, True]
    points = work.snapshot_points[0].tolist()
    assert sorted(point for point in points if point != NO_ID) == [6, 13, 20]
    batch = build(work, StepShape(chunk_size=8, num_cells=6, num_rows=2), SLOTS)
    filed = dict(
        zip(batch.write_slot.tolist(), batch.write_count.tolist(), strict=True)
    )
    slot = [slots[0, points.index(point)].item() for point in (6, 13, 20)]
    assert [filed[name] for name in slot] == [6, 5, 4]


@pytest.mark.parametrize(
    "fields, said",
    [
        (dict(chunk_size=0, num_cells=1, num_rows=1), "chunk_size must be at least 1"),
        (dict(chunk_size=4, num_cells=-1, num_rows=1), "num_cells must be >= 0"),
        (dict(chunk_size=4, num_cells=0, num_rows=0), "nothing to run"),
    ],
)
def test_shapes_that_cannot_be(fields, said):
    with pytest.raises(ValueError, match=said):
        StepShape(**fields)
