"""Several decode steps in one call: tokens stay on the device between them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.models.batch import Batch
from jaxsched.models.pools import Pools

Array = jax.Array
Forward = Callable[[list, Pools, Batch], tuple[Pools, Array]]
# (logits f32[R, V], positions i32[R] of the tokens that gave them) -> i32[R] tokens
Sample = Callable[[Array, Array], Array]


def greedy(logits: Array, positions: Array) -> Array:
    """The likeliest token of each row, the lowest id among equals; i32[R]."""
    del positions
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def decode_steps(
    forward: Forward,
    leaves: list,
    pools: Pools,
    batch: Batch,
    num_steps: int,
    sample: Sample = greedy,
) -> tuple[Pools, Array]:
    """Runs `num_steps` decode steps of a batch of rows, feeding each its own samples.

    Pure: jit it with `forward`, `num_steps` and `sample` bound, and `pools` donated.
    The bits are those of as many single steps. Every row needs pages for its positions
    up to the last step; a row that meets its stop token early runs on, and the caller
    drops what it gave.

    Args:
      forward: the model's step, as `ServedModel.forward`.
      leaves: its weights.
      pools: the storage.
      batch: rows alone (no cells); its tokens are those of the first step.
      num_steps: static.
      sample: from logits to tokens.

    Returns:
      The pools after the last step, and i32[num_steps, R] sampled tokens.

    Raises:
      ValueError: at trace time, if the batch has cells.
    """
    if batch.cell_tokens.shape[0]:
        cells = batch.cell_tokens.shape[0]
        raise ValueError(f"decode_steps runs rows alone, got a batch of {cells} cells")

    def step(carry: tuple[Pools, Batch], _) -> tuple[tuple[Pools, Batch], Array]:
        pools, batch = carry
        pools, logits = forward(leaves, pools, batch)
        tokens = sample(logits, batch.row_positions)
        batch = batch.replace(
            row_tokens=tokens,
            row_positions=batch.row_positions + 1,
            # From the second step on a row continues from what it stored itself.
            row_load_slot=jnp.where(batch.row_mask, batch.row_store_slot, 0),
        )
        return (pools, batch), tokens

    (pools, _), tokens = lax.scan(step, (pools, batch), length=num_steps)
    return pools, tokens
