"""A step compiles once, updates its pools in place, and padding reaches nobody."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched.models.batch import StepShape, Work, build_batch
from jaxsched.models.pools import ZERO_SLOT, copy_pages, copy_states, init_pools
from jaxsched.models.serving import ServedModel
from model_cases import tiny

SHAPE = StepShape(chunk_size=4, num_cells=4, num_rows=2, num_writes=6, num_logits=3)
SIZES = dict(num_pages=300, page_size=4, num_slots=400)
CONFIG = tiny("bamba", num_hidden_layers=1, attn_layer_indices=[])


@pytest.fixture(scope="module")
def model():
    return ServedModel.random(CONFIG, 0)


@pytest.fixture(scope="module")
def build():
    return jax.jit(build_batch, static_argnames=("shape", "num_slots"))


@pytest.fixture(scope="module")
def compiled(model, build):
    """The one executable of this shape: a batch of another shape would be refused."""
    batch = build(next(steps()), SHAPE, SIZES["num_slots"])
    step = jax.jit(model.forward, donate_argnums=1)
    return step.lower(model.leaves, init_pools(CONFIG, **SIZES), batch).compile()


def work(starts, counts, decode, last, loads, stores):
    rows = len(starts)
    tokens = np.random.default_rng(0).integers(0, 19, (rows, 32), np.int32)
    return Work(
        token_ids=jnp.asarray(tokens),
        start=jnp.array(starts, jnp.int32),
        count=jnp.array(counts, jnp.int32),
        is_decode=jnp.array(decode, bool),
        is_last=jnp.array(last, bool),
        block_tables=jnp.arange(rows * 4, dtype=jnp.int32).reshape(rows, 4),
        load_slots=jnp.array(loads, jnp.int32),
        store_slots=jnp.array(stores, jnp.int32),
        snapshot_points=jnp.full((rows, 1), -1, jnp.int32),
        snapshot_slots=jnp.full((rows, 1), -1, jnp.int32),
    )


def steps():
    """Prefill of two, then of one beside a decode, then nothing at all."""
    yield work([0, 0], [6, 5], [0, 0], [0, 1], [0, 0], [1, 2])
    yield work([6, 5], [3, 1], [0, 1], [1, 0], [1, 2], [1, 2])
    yield work([9, 6], [0, 0], [0, 0], [0, 0], [1, 2], [1, 2])


def test_one_executable_runs_every_mix_without_the_host(model, build, compiled):
    pools = init_pools(CONFIG, **SIZES)
    for item in steps():
        batch = build(item, SHAPE, SIZES["num_slots"])
        with jax.transfer_guard_device_to_host("disallow"):
            before = pools
            pools, logits = compiled(model.leaves, pools, batch)
        assert before.ssm.is_deleted() and before.key_pages.is_deleted()
        assert logits.shape == (3 + 2, CONFIG.vocab_size)
        assert int(batch.num_missed) == 0
        assert np.isfinite(np.asarray(logits)).all()


def test_pools_are_updated_in_place(compiled):
    """Every pool is aliased, and nothing of a pool's size is made on the way."""
    pools = jax.eval_shape(lambda: init_pools(CONFIG, **SIZES))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pools))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 8


def test_padding_and_the_zero_slot_are_never_used(model, build, compiled):
    """Garbage in every padding entry of a batch changes no bit of anything."""
    item = work([0, 0], [6, 0], [False] * 2, [True, False], [0, 0], [1, 2])
    clean = build(item, SHAPE, SIZES["num_slots"])
    fill = np.asarray(clean.cell_fill)
    tokens = np.asarray(clean.cell_tokens).copy()
    tokens[np.arange(4)[None] >= fill[:, None]] = 17
    dirty = clean.replace(
        cell_tokens=jnp.asarray(tokens),
        row_tokens=jnp.full_like(clean.row_tokens, 11),
        row_positions=jnp.full_like(clean.row_positions, 7),
    )
    found = []
    for batch in (clean, dirty):
        pools, logits = compiled(model.leaves, init_pools(CONFIG, **SIZES), batch)
        found.append((pools, logits[0]))
    chex.assert_trees_all_equal(*found)
    pools = found[0][0]
    for values in (pools.ssm, pools.conv, pools.tail):
        assert not np.asarray(values[:, ZERO_SLOT]).any()
        assert not np.asarray(values[:, 2:]).any()
    assert np.asarray(pools.ssm[:, 1]).any()


def test_states_and_pages_are_copied_whole():
    shapes = init_pools(tiny("bamba"), num_pages=16, page_size=4, num_slots=8)
    made = np.random.default_rng(0)
    pools = jax.tree.map(
        lambda v: jnp.asarray(made.integers(0, 9, v.shape).astype(v.dtype)), shapes
    )
    pools = pools.replace(num_tail=jnp.arange(8, dtype=jnp.int32) % 4)
    sources, targets = jnp.array([3, 5, 6]), jnp.array([1, 2, 8])
    copied = jax.jit(copy_states)(pools, sources, targets)
    for name in ("ssm", "conv", "tail"):
        before, after = getattr(pools, name), getattr(copied, name)
        np.testing.assert_array_equal(after[:, 1], before[:, 3])
        np.testing.assert_array_equal(after[:, 2], before[:, 5])
        np.testing.assert_array_equal(after[:, 3:], before[:, 3:])
    assert copied.num_tail.tolist() == [0, 3, 1, 3, 0, 1, 2, 3]
    copied = jax.jit(copy_pages)(pools, jnp.array([4, 5]), jnp.array([0, 16]))
    np.testing.assert_array_equal(copied.key_pages[:, 0], pools.key_pages[:, 4])
    np.testing.assert_array_equal(copied.value_pages[:, 1:], pools.value_pages[:, 1:])


def test_wrong_parameters_are_named(model):
    config = CONFIG
    parameters = {name: model.parameter(name) for name in model.names}
    ServedModel(config, parameters)
    with pytest.raises(ValueError, match="1 tensors missing: final_norm.weight"):
        ServedModel(config, {k: v for k, v in parameters.items() if "final" not in k})
    with pytest.raises(ValueError, match="1 tensors unknown: other"):
        ServedModel(config, parameters | {"other": np.ones(1)})
    wrong = {"final_norm.weight": np.ones(3, np.float32)}
    with pytest.raises(ValueError, match=r"final_norm.weight must be float32\(15,\)"):
        ServedModel(config, parameters | wrong)
    with pytest.raises(ValueError, match="num_slots must be at least 2, got 1"):
        init_pools(config, num_pages=1, page_size=1, num_slots=1)
