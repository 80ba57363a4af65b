"""`Batch`: what one model step reads, at a fixed shape, built on the device.

Prefill tokens lie in C *cells* of Q columns: a cell is one interval [kQ, (k+1)Q) of
the absolute positions of one request, a request's cells follow each other. Decoding
tokens lie in R *rows*. The two go through separate products: a row joined to the
cells' product would get other bits than in a step of rows alone.

Shape letters: A rows of the request table, C cells, Q columns, R rows, E state writes,
B blocks of a request's table, U logits read from cells, P snapshot points of a request.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsched.core.masking import iota
from jaxsched.core.plan import Plan
from jaxsched.core.requests import RequestTable

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """The sizes of a step: one executable each. Bits are promised within one set.

    The number of cells is part of what a token's bits depend on, so a deployment keeps
    one; the number of rows is not, and a step of rows alone has `num_cells=0`.
    """

    chunk_size: int
    num_cells: int
    num_rows: int
    num_writes: int = 0  # state writes; 0: one a cell and one a row of the table
    num_logits: int = 0  # logits from cells; 0: of every column (for tests)
    carry_tails: bool = True

    def __post_init__(self):
        for name in ("chunk_size",):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {self.chunk_size}")
        for name in ("num_cells", "num_rows", "num_writes", "num_logits"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.num_cells + self.num_rows == 0:
            raise ValueError("num_cells and num_rows are both 0: nothing to run")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """What each request does in a step; rows with `count` 0 do nothing."""

    token_ids: Array  # i32[A, L]  by absolute position, prompt and answer
    start: Array  # i32[A]  first position to compute
    count: Array  # i32[A]  tokens; 1 where decoding
    is_decode: Array  # bool[A]
    is_last: Array  # bool[A]  a prefill that reaches its prompt's end
    block_tables: Array  # i32[A, B]
    # State to start from: ZERO_SLOT at position 0; its own slot where decoding, which
    # no other request writes in the same step.
    load_slots: Array  # i32[A]
    store_slots: Array  # i32[A]  where the state after the step goes
    snapshot_points: Array  # i32[A, P]  positions in (start, start + count], or NO_ID
    snapshot_slots: Array  # i32[A, P]  where their states go

    def replace(self, **fields: Array) -> "Work":
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One step's input; see the module's head for the letters."""

    cell_tokens: Array  # i32[C, Q]
    cell_start: Array  # i32[C]  position of column 0
    cell_first_fresh: Array  # i32[C]  first column that this step computes
    cell_fill: Array  # i32[C]  columns that exist; 0: padding
    cell_is_first: Array  # bool[C]  first of its request in this step
    cell_load_slot: Array  # i32[C]  read where `cell_is_first`
    cell_tables: Array  # i32[C, B]
    row_tokens: Array  # i32[R]
    row_positions: Array  # i32[R]
    row_mask: Array  # bool[R]
    row_load_slot: Array  # i32[R]
    row_store_slot: Array  # i32[R]  past the end on padding
    row_tables: Array  # i32[R, B]
    write_cell: Array  # i32[E]
    write_count: Array  # i32[E]  columns of the cell that the stored state is behind
    write_slot: Array  # i32[E]  past the end: no write
    write_plain: Array  # bool[E]  the state of that position itself, without a tail
    logit_columns: Array  # i32[U]  flat column (cell * Q + column) to read logits of
    logit_row: Array  # i32[A]  this request's row in the step's logits, or NO_ID
    num_missed: Array  # i32[]  cells, rows, writes and logits that found no room

    def replace(self, **fields: Array) -> "Batch":
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)


def work_from_plan(
    plan: Plan,
    table: RequestTable,
    *,
    token_ids: Array,
    block_tables: Array,
    load_slots: Array,
    store_slots: Array,
    snapshot_slots: Array,
) -> Work:
    """The work of a plan.

    Args:
      plan: what to run; drafts and beams are not run by this step.
      table: the requests it was made for.
      token_ids: i32[A, L] prompt and answer tokens by position.
      block_tables: i32[A, B].
      load_slots: i32[A]; store_slots: i32[A].
      snapshot_slots: i32[A, P + 1] slots for `plan.emit_points` and then for
        `plan.snapshot_point`; NO_ID: not to be filed.
    """
    points = jnp.concatenate([plan.emit_points, plan.snapshot_point[:, None]], axis=1)
    runs = plan.prefill_mask | plan.decode_mask
    prefill_count = jnp.where(plan.prefill_mask, plan.num_scheduled_tokens, 1)
    return Work(
        token_ids=token_ids,
        start=table.num_computed_tokens,
        count=jnp.where(runs, prefill_count, 0),
        is_decode=plan.decode_mask,
        is_last=plan.is_last_chunk,
        block_tables=block_tables,
        load_slots=load_slots,
        store_slots=store_slots,
        snapshot_points=jnp.where(plan.prefill_mask[:, None], points, -1),
        snapshot_slots=snapshot_slots,
    )


def build_batch(work: Work, shape: StepShape, num_slots: int) -> Batch:
    """Lays the work of a step out in cells and rows; log-depth, jit it.

    Work that finds no room is left out and counted in `num_missed`, which the caller
    keeps at 0 by its budget: a prefill needs one cell more than its tokens fill where
    its start is not on the grid.

    Args:
      work: what each request does.
      shape: the sizes of the step.
      num_slots: slots of the pool, the index past its end.
    """
    chunk, cells = shape.chunk_size, shape.num_cells
    end = work.start + work.count
    prefills = (work.count > 0) & ~work.is_decode
    opening = work.start // chunk  # grid index of the first cell
    spans = jnp.where(prefills, (end + chunk - 1) // chunk - opening, 0)
    ends = jnp.cumsum(spans)
    first_cell = ends - spans
    owner = jnp.searchsorted(ends, iota(cells), side="right").astype(jnp.int32)
    exists = iota(cells) < ends[-1]
    owner = jnp.where(exists, owner, 0)
    step = iota(cells) - first_cell[owner]
    start = (opening[owner] + step) * chunk
    fill = jnp.where(exists, jnp.clip(end[owner] - start, 0, chunk), 0)
    first_fresh = jnp.where(step == 0, work.start[owner] - start, 0)
    writes, missed_writes = _state_writes(work, shape, num_slots, first_cell, prefills)
    rows, row_of, missed_rows = _rows(work, shape, num_slots)
    logits = _logits(work, shape, first_cell, prefills, row_of)
    missed_cells = jnp.maximum(ends[-1] - cells, 0)
    return Batch(
        cell_tokens=_tokens(work, owner, start, chunk),
        cell_start=start,
        cell_first_fresh=jnp.where(exists, first_fresh, 0),
        cell_fill=fill,
        cell_is_first=exists & (step == 0),
        cell_load_slot=jnp.where(exists & (step == 0), work.load_slots[owner], 0),
        cell_tables=work.block_tables[owner],
        **rows,
        **writes,
        logit_columns=logits[0],
        logit_row=logits[1],
        num_missed=missed_cells + missed_rows + missed_writes + logits[2],
    )


def _tokens(work: Work, owner: Array, start: Array, chunk: int) -> Array:
    columns = start[:, None] + iota(chunk)[None]
    found = work.token_ids.at[owner[:, None], columns].get(mode="fill", fill_value=0)
    return jnp.maximum(found, 0)


def _compact(mask: Array, size: int) -> tuple[Array, Array, Array]:
    """Indices of the true entries, [size]; which exist; how many do not fit."""
    ranks = jnp.cumsum(mask.astype(jnp.int32))
    index = jnp.searchsorted(ranks, iota(size) + 1, side="left").astype(jnp.int32)
    exists = iota(size) < ranks[-1]
    return jnp.where(exists, index, 0), exists, jnp.maximum(ranks[-1] - size, 0)


def _rows(work: Work, shape: StepShape, num_slots: int) -> tuple[dict, Array, Array]:
    decodes = (work.count > 0) & work.is_decode
    index, exists, missed = _compact(decodes, shape.num_rows)
    positions = jnp.where(exists, work.start[index], 0)
    tokens = work.token_ids.at[index, positions].get(mode="fill", fill_value=0)
    rank = jnp.cumsum(decodes.astype(jnp.int32)) - 1
    row_of = jnp.where(decodes & (rank < shape.num_rows), rank, -1)
    rows = dict(
        row_tokens=jnp.maximum(tokens, 0),
        row_positions=positions,
        row_mask=exists,
        row_load_slot=jnp.where(exists, work.load_slots[index], 0),
        row_store_slot=jnp.where(exists, work.store_slots[index], num_slots),
        row_tables=work.block_tables[index],
    )
    return rows, row_of, missed


def _state_writes(
    work: Work, shape: StepShape, num_slots: int, first_cell: Array, prefills: Array
) -> tuple[dict, Array]:
    """One write for the running state of each prefill, and one a snapshot point."""
    end = work.start + work.count
    points = jnp.concatenate([end[:, None], work.snapshot_points], axis=1)
    slots = jnp.concatenate([work.store_slots[:, None], work.snapshot_slots], axis=1)
    inside = (points > work.start[:, None]) & (points <= end[:, None])
    wanted = inside & prefills[:, None] & (slots > 0)
    grid = (points - 1) // shape.chunk_size
    cell = first_cell[:, None] + grid - (work.start // shape.chunk_size)[:, None]
    count = points - grid * shape.chunk_size
    wanted &= cell < shape.num_cells
    # A decoding request needs the state of its position itself, not a tail; at a grid
    # point the two forms are one.
    runs = iota(points.shape[1]) == 0
    plain = (count == shape.chunk_size) | (runs[None] & work.is_last[:, None])
    plain |= not shape.carry_tails
    size = shape.num_writes or shape.num_cells + work.start.shape[0]
    size = size if shape.num_cells else 0
    index, exists, missed = _compact(wanted.reshape(-1), size)
    writes = dict(
        write_cell=jnp.where(exists, cell.reshape(-1)[index], 0),
        write_count=count.reshape(-1)[index],
        write_slot=jnp.where(exists, slots.reshape(-1)[index], num_slots),
        write_plain=plain.reshape(-1)[index],
    )
    return writes, missed


def _logits(
    work: Work, shape: StepShape, first_cell: Array, prefills: Array, row_of: Array
) -> tuple[Array, Array, Array]:
    """Columns whose logits to compute, each request's row among them, and misses."""
    chunk = shape.chunk_size
    last = work.start + work.count - 1
    cell = first_cell + last // chunk - work.start // chunk
    column = cell * chunk + last % chunk
    wanted = prefills & work.is_last & (cell < shape.num_cells)
    total = shape.num_cells * chunk
    if shape.num_logits == 0 or shape.num_cells == 0:
        columns, missed, rank = iota(total), jnp.int32(0), column
        size = total
    else:
        size = shape.num_logits
        index, _, missed = _compact(wanted, size)
        columns = jnp.where(wanted[index], column[index], 0)
        rank = jnp.cumsum(wanted.astype(jnp.int32)) - 1
        wanted &= rank < size
    decoded = jnp.where(row_of >= 0, size + row_of, -1)
    return columns, jnp.where(wanted, rank, decoded), missed
