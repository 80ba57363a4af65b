"""A served hybrid model as the `ModelStep` that an engine runs."""

import jax
import jax.numpy as jnp

from jaxsched.core.masking import iota
from jaxsched.engine.config import EngineConfig
from jaxsched.engine.model import Copies, ModelStep, RowWork, StepResult, StepWork
from jaxsched.models.batch import Batch, StepShape, Work, build_batch
from jaxsched.models.pools import Pools, copy_pages, copy_states, init_pools
from jaxsched.models.sampling import sample
from jaxsched.models.serving import ServedModel

Array = jax.Array


def engine_step(
    model: ServedModel,
    config: EngineConfig,
    *,
    num_cells: int = 0,
    carry_tails: bool = True,
) -> ModelStep:
    """What an engine of this configuration runs.

    Args:
      model: weights and layers.
      config: of the engine.
      num_cells: intervals of the scan grid that a mixed step computes; 0: as many as
        the token budget fills, and one more for a start off the grid. A token's bits
        depend on it, so results compare among engines of one number.
      carry_tails: whether states keep the open interval's rows, which makes every cut
        exact; without, cuts must fall on multiples of the scan chunk.

    Raises:
      ValueError: if the cells do not hold the token budget.
    """
    chunk = model.config.mamba.chunk_size
    least = -(-config.max_num_batched_tokens // chunk) + 1
    cells = num_cells or least
    if cells < least:
        raise ValueError(
            f"num_cells must be at least {least} for max_num_batched_tokens="
            f"{config.max_num_batched_tokens} and a scan chunk of {chunk}, got {cells}"
        )
    rows = config.max_num_seqs
    filing = min(rows, cells)
    points = min(filing * config.num_filed, config.max_num_batched_tokens)
    shape = StepShape(
        chunk_size=chunk,
        num_cells=cells,
        num_rows=rows,
        num_writes=filing + points,
        num_logits=rows,
        carry_tails=carry_tails,
    )

    def fresh_pools(num_pages: int, page_size: int, num_slots: int) -> Pools:
        return init_pools(
            model.config,
            num_pages=num_pages,
            page_size=page_size,
            num_slots=num_slots,
            dtype=model.dtype,
            carry_tails=carry_tails,
        )

    def run(weights, pools: Pools, work: StepWork) -> tuple[Pools, StepResult]:
        fields = {name: getattr(work, name) for name in Work.__dataclass_fields__}
        batch = build_batch(Work(**fields), shape, pools.num_slots)
        pools, logits = model.forward(weights, pools, batch)
        fresh = jnp.maximum(batch.cell_fill - batch.cell_first_fresh, 0)
        computed = jnp.sum(fresh) + jnp.sum(batch.row_mask.astype(jnp.int32))
        return pools, StepResult(
            logits=logits[jnp.maximum(batch.logit_row, 0)],
            num_tokens=computed,
            num_missed=batch.num_missed,
        )

    def decode(weights, pools: Pools, work: RowWork) -> tuple[Pools, Array]:
        return model.forward(weights, pools, rows_batch(work, chunk, pools.num_slots))

    def copy(pools: Pools, copies: Copies) -> Pools:
        pools = copy_pages(pools, copies.page_source, copies.page_target)
        return copy_states(pools, copies.slot_source, copies.slot_target)

    return ModelStep(
        vocab_size=model.config.vocab_size,
        weights=model.leaves,
        init_pools=fresh_pools,
        run=run,
        decode=decode,
        copy=copy,
        sample=sample,
        chunk_size=chunk,
        num_cells=cells,
    )


def rows_batch(work: RowWork, chunk_size: int, num_slots: int) -> Batch:
    """A batch of decoding rows alone, one a row of the engine."""
    active = work.is_active

    def empty(*shape: int) -> Array:
        return jnp.zeros(shape, jnp.int32)

    return Batch(
        cell_tokens=empty(0, chunk_size),
        cell_start=empty(0),
        cell_first_fresh=empty(0),
        cell_fill=empty(0),
        cell_is_first=jnp.zeros(0, bool),
        cell_load_slot=empty(0),
        cell_tables=empty(0, work.block_tables.shape[1]),
        row_tokens=work.token_ids,
        row_positions=jnp.where(active, work.positions, 0),
        row_mask=active,
        row_load_slot=jnp.where(active, work.slots, 0),
        row_store_slot=jnp.where(active, work.slots, num_slots),
        row_tables=work.block_tables,
        write_cell=empty(0),
        write_count=empty(0),
        write_slot=empty(0),
        write_plain=jnp.zeros(0, bool),
        logit_columns=empty(0),
        logit_row=iota(active.shape[0]),
        num_missed=jnp.int32(0),
    )
