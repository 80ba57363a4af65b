"""Trace-time checks on entry of public functions: shapes and dtypes, never values.

They cost nothing at run time. Values are checked where Python numbers enter, in the
host-side constructors.
"""

import dataclasses

import chex
import jax.numpy as jnp

from jaxsched.core.plan import Budget, Plan
from jaxsched.core.requests import RequestTable

_BOOL_FIELDS = frozenset(
    ("in_flight", "is_last_chunk", "prefill_mask", "decode_mask", "encode_mask")
    + ("preempted_mask",)
)
_WIDE_FIELDS = frozenset(("requested_points", "snapshot_points", "emit_points"))
_SCALAR_FIELDS = frozenset(("num_seqs", "num_batched_tokens", "error"))


def check_table(table: RequestTable) -> None:
    """Raises ValueError unless every field is shaped [R] (points: [R, n]) and typed."""
    _check_fields(table, table.phase.shape[0] if table.phase.ndim == 1 else None)


def check_plan(plan: Plan, table: RequestTable) -> None:
    """Raises ValueError unless a plan has one row for each row of the table."""
    _check_fields(plan, table.num_rows)


def check_budget(budget: Budget) -> None:
    """Raises ValueError unless every limit is an int32 scalar."""
    for field in dataclasses.fields(budget):
        _check(budget, field.name, (), jnp.int32)


def _check_fields(value, num_rows: int | None) -> None:
    if num_rows is None:
        raise ValueError(f"{type(value).__name__}.phase must have one axis, [R]")
    for field in dataclasses.fields(value):
        name = field.name
        shape = (num_rows, None) if name in _WIDE_FIELDS else (num_rows,)
        shape = () if name in _SCALAR_FIELDS else shape
        _check(value, name, shape, jnp.bool_ if name in _BOOL_FIELDS else jnp.int32)


def _check(value, name: str, shape: tuple, dtype) -> None:
    array = getattr(value, name)
    try:
        chex.assert_shape(array, shape)
        chex.assert_type(array, dtype)
    except (AssertionError, AttributeError) as wrong:
        got = f"{getattr(array, 'dtype', type(array))}{getattr(array, 'shape', '')}"
        raise ValueError(
            f"{type(value).__name__}.{name} must be "
            f"{jnp.dtype(dtype).name}{list(shape)}, got {got}; batch tables with "
            "jax.vmap"
        ) from wrong
