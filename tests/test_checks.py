"""Shapes and dtypes are refused at trace time, by field."""

import jax
import jax.numpy as jnp
import pytest

import jaxsched as js

CONFIG = js.SchedulerConfig()
LIMITS = js.budget(max_num_batched_tokens=128)


def _table():
    return js.request_table([{"num_prompt_tokens": 10}] * 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_prompt_tokens", jnp.zeros(3, jnp.int32)),
        ("num_prompt_tokens", jnp.zeros(4, jnp.float32)),
        ("in_flight", jnp.zeros(4, jnp.int32)),
        ("snapshot_points", jnp.zeros(4, jnp.int32)),
        ("lora_id", None),
        ("phase", jnp.zeros((2, 4), jnp.int32)),
    ],
)
def test_a_misshapen_table_is_refused(field, value):
    with pytest.raises(ValueError, match=f"RequestTable.{field} must"):
        js.schedule(_table().replace(**{field: value}), LIMITS, CONFIG)


def test_a_budget_of_arrays_is_refused():
    limits = LIMITS.replace(max_num_seqs=jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="Budget.max_num_seqs must be int32"):
        jax.jit(js.schedule, static_argnums=2)(_table(), limits, CONFIG)


def test_a_plan_of_another_table_is_refused():
    plan = jax.jit(js.schedule, static_argnums=2)(_table(), LIMITS, CONFIG)
    with pytest.raises(ValueError, match="Plan.num_scheduled_tokens must"):
        js.advance(js.request_table([{"num_prompt_tokens": 10}] * 8), plan)


def test_chunk_sizes_refuse_what_they_cannot_cut():
    zeros, points = jnp.zeros(2, jnp.int32), jnp.zeros((2, 1), jnp.int32)
    with pytest.raises(ValueError, match="cuts no chunks"):
        js.chunk_sizes(zeros, zeros, points, 10, 4, policy="none")
    with pytest.raises(ValueError, match=r"snapshot_points\[3, 1\] must have one row"):
        js.chunk_sizes(zeros, zeros, jnp.zeros((3, 1), jnp.int32), 10, 4)
