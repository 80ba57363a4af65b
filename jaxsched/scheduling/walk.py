"""What a walk over the rows gives, in whichever form it is taken.

`walk_parallel` and `walk_sequential` hold the same five functions. The first has no
loop over rows and is for accelerators; the second is one `lax.scan` a walk, which a
CPU runs several times faster (benchmarks/README.md). `SchedulerConfig.row_walk`
chooses; both give the same plans, bit for bit.
"""

from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsched.core.config import MAX_COUNT, RowWalk
from jaxsched.core.masking import round_down

Array = jax.Array


class Walk(NamedTuple):
    """Rows taken in order until the budget breaks or the seats are taken."""

    taken: Array  # bool[R]
    reason: Array  # i32[R]  for the rows not taken
    reached: Array  # bool[R]  looked at before the walk ended


class Deal(NamedTuple):
    """Chunk sizes from a capacity dealt in order."""

    size: Array  # i32[R]
    seat_left: Array  # bool[R]  whether a seat was left when the row was reached


def walks_of(row_walk: RowWalk) -> ModuleType:
    """The module that holds the walks of a form."""
    # Both import the types above, so they cannot be imported before them.
    from jaxsched.scheduling import walk_parallel, walk_sequential

    forms = {RowWalk.PARALLEL: walk_parallel, RowWalk.SEQUENTIAL: walk_sequential}
    return forms[row_walk]


def to_boundary(position: Array, room: Array, unit: Array) -> Array:
    """Size of the longest chunk within `room` tokens that ends on a unit boundary."""
    reach = position + jnp.minimum(room, MAX_COUNT)
    return jnp.maximum(round_down(reach, unit) - position, 0)
