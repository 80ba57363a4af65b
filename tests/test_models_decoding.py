"""Many decode steps in one call are the same steps in as many calls, bit for bit."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched.models.batch import Batch
from jaxsched.models.decoding import decode_steps, greedy
from jaxsched.models.pools import init_pools
from jaxsched.models.serving import ServedModel
from model_cases import tiny

MAMBA = tiny("mamba2", num_hidden_layers=1)
ROWS, BLOCKS, SLOTS, STEPS = 3, 4, 6, 7


def rows_alone(tokens, positions):
    """A batch of two decoding rows and one of padding."""

    def empty(*shape):
        return jnp.zeros(shape, jnp.int32)

    return Batch(
        cell_tokens=empty(0, 4),
        cell_start=empty(0),
        cell_first_fresh=empty(0),
        cell_fill=empty(0),
        cell_is_first=jnp.zeros(0, bool),
        cell_load_slot=empty(0),
        cell_tables=empty(0, BLOCKS),
        row_tokens=tokens,
        row_positions=positions,
        row_mask=jnp.array([True, True, False]),
        row_load_slot=jnp.array([1, 4, 0], jnp.int32),
        row_store_slot=jnp.array([1, 2, SLOTS], jnp.int32),
        row_tables=jnp.arange(ROWS * BLOCKS, dtype=jnp.int32).reshape(ROWS, BLOCKS),
        write_cell=empty(0),
        write_count=empty(0),
        write_slot=empty(0),
        write_plain=jnp.zeros(0, bool),
        logit_columns=empty(0),
        logit_row=empty(ROWS),
        num_missed=jnp.int32(0),
    )


def test_one_call_is_many():
    model = ServedModel.random(MAMBA, 4)
    made = np.random.default_rng(0)

    def fresh():
        pools = init_pools(MAMBA, num_pages=12, page_size=4, num_slots=SLOTS)
        states = made.standard_normal(pools.ssm.shape).astype(np.float32)
        return pools.replace(ssm=pools.ssm.at[:, 1:].set(states[:, 1:]))

    start = fresh()
    first = rows_alone(jnp.array([3, 5, 0], jnp.int32), jnp.array([2, 0, 0], jnp.int32))
    many = jax.jit(
        functools.partial(decode_steps, model.forward, num_steps=STEPS),
        donate_argnums=1,
    )
    copied = jax.tree.map(jnp.array, start)
    pools, tokens = many(model.leaves, copied, first)
    assert tokens.shape == (STEPS, ROWS)
    batch, single = first, start
    for step in range(STEPS):
        single, logits = model.step(single, batch)
        right = np.argmax(np.asarray(logits), axis=-1)
        np.testing.assert_array_equal(tokens[step, :2], right[:2])
        batch = batch.replace(
            row_tokens=jnp.asarray(right.astype(np.int32)),
            row_positions=batch.row_positions + 1,
            row_load_slot=jnp.array([1, 2, 0], jnp.int32),
        )
    chex.assert_trees_all_equal(pools, single)
    assert len(np.unique(np.asarray(tokens[:, 0]))) > 1  # not one token for ever


def test_cells_are_refused():
    batch = rows_alone(jnp.zeros(ROWS, jnp.int32), jnp.zeros(ROWS, jnp.int32))
    batch = batch.replace(cell_tokens=jnp.zeros((2, 4), jnp.int32))
    with pytest.raises(ValueError, match="got a batch of 2 cells"):
        decode_steps(None, [], None, batch, 3)


def test_greedy_takes_the_lowest_of_equals():
    logits = jnp.array([[0.0, 2.0, 2.0], [1.0, 0.0, -1.0]])
    assert greedy(logits, jnp.zeros(2, jnp.int32)).tolist() == [1, 0]
