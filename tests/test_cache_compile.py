"""Invariant 8: one compilation, no loop, no transfer, tables updated in place."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched.cache.hybrid import (
    HybridConfig,
    Prompts,
    Step,
    commit,
    empty_cache,
    lookup,
    release,
    reserve,
)
from planner_harness import quick_compile

CONFIG = HybridConfig(
    block_size=8,
    num_blocks=200,
    blocks_per_row=24,
    num_rows=8,
    num_snapshots=20,
    num_admitted=4,
    max_commit_blocks=48,
    num_ghosts=32,
    num_seen=1024,
    selection="sort",
)


def _step(cache, tokens, row, now, config):
    """Admission, a step and the end of every row, as a serving loop fuses them."""
    count = config.num_admitted
    prompts = Prompts(
        tokens=tokens[:count],
        length=jnp.full(count, 91, jnp.int32),
        lora_id=jnp.full(count, -1, jnp.int32),
        salt=jnp.zeros(count, jnp.int32),
        reads=jnp.ones(count, bool),
    )
    match = lookup(cache, prompts, config)
    cache, placed = reserve(cache, row, prompts, match, prompts.length, now, config)
    reached = jnp.zeros(config.num_rows, jnp.int32).at[row].set(90)
    step = Step(
        tokens=tokens,
        num_tokens=reached,
        points=reached[:, None],
        next_use=jnp.zeros_like(reached),
    )
    cache, filed = commit(cache, step, now, config)
    cache = release(cache, row, config)
    return cache, placed.num_cached_tokens, filed.slot


def _arguments(config):
    width = config.blocks_per_row * config.block_size
    tokens = np.random.default_rng(0).integers(0, 99, (config.num_rows, width))
    row = jnp.arange(config.num_admitted, dtype=jnp.int32)
    return empty_cache(config), jnp.int32(tokens), row, jnp.int32(5)


@functools.cache
def _compiled(policy):
    config = HybridConfig(**{**vars(CONFIG), "eviction": policy})
    function = functools.partial(_step, config=config)
    jitted = jax.jit(function, donate_argnums=0)
    lowered = jitted.lower(*_arguments(config))
    return lowered.as_text(), lowered.compile()


@pytest.mark.parametrize("policy", ["reuse_density"])
def test_no_loop_at_all_in_the_accelerator_form(policy):
    text, _ = _compiled(policy)
    assert "stablehlo.sort" in text
    assert not re.search(r"stablehlo\.while|\bwhile\b", text)


def test_the_cpu_form_is_seen_to_loop():
    """The test above can fail: halving is a loop of 32 steps."""
    config = HybridConfig(**{**vars(CONFIG), "selection": "halving"})
    function = functools.partial(_step, config=config)
    assert "stablehlo.while" in jax.jit(function).lower(*_arguments(config)).as_text()


def test_donated_tables_are_updated_in_place():
    _, compiled = _compiled("reuse_density")
    memory = compiled.memory_analysis()
    tables = sum(leaf.nbytes for leaf in jax.tree.leaves(empty_cache(CONFIG)))
    assert memory.alias_size_in_bytes >= 0.98 * tables


def test_one_compilation_and_no_transfer_whatever_happens():
    """Misses, hits, evictions, filed and refreshed states: one program, no host."""
    chex.clear_trace_counter()
    counted = functools.partial(chex.assert_max_traces(_step, n=1), config=CONFIG)
    jitted = quick_compile(counted)
    cache, tokens, row, now = _arguments(CONFIG)
    variants = [(jnp.roll(tokens, k % 3, axis=0), now + k) for k in range(12)]
    results = []
    with jax.transfer_guard("disallow"):
        for moved, when in variants:
            cache, cached, slot = jitted(cache, moved, row, when)
            results.append((cached, slot))
    hits = [cached.tolist() for cached, _ in results]
    assert hits[0] == [0] * 4
    assert max(max(some) for some in hits) > 0
    assert int(cache.tick) == 3 * len(variants)


def test_donated_and_kept_tables_give_the_same():
    kept = quick_compile(functools.partial(_step, config=CONFIG))
    _, donated = _compiled("reuse_density")
    one, tokens, row, now = _arguments(CONFIG)
    two = jax.tree.map(jnp.copy, one)
    for shift in range(3):
        moved = jnp.roll(tokens, shift, axis=0)
        one, first, _ = kept(one, moved, row, now)
        two, second, _ = donated(two, moved, row, now)
        assert first.tolist() == second.tolist()
    for path, leaf in jax.tree_util.tree_leaves_with_path(one):
        if leaf.dtype != jnp.float32:  # learned rates may differ in the last bit
            other = dict(jax.tree_util.tree_leaves_with_path(two))[path]
            assert (leaf == other).all(), path
