"""Planning from the host with one buffer in and one buffer out.

A call of a compiled function costs a little for every array that goes in and more for
every array that comes out, and for small tables that is most of the time. So the
request table and the budget travel as one int32 buffer, the plan as another, and both
sides see named views of them.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.core.build import request_columns
from jaxsched.core.config import RowWalk, SchedulerConfig
from jaxsched.core.plan import Budget, Plan
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.scheduler import schedule

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each named array lies in a flat int32 buffer; hashable."""

    fields: tuple[tuple[str, tuple[int, ...], bool], ...]  # name, shape, is boolean

    @property
    def size(self) -> int:
        """Length of the buffer."""
        return sum(math.prod(shape) for _, shape, _ in self.fields)

    def split(self, buffer) -> dict:
        """Named pieces of a buffer; NumPy views or traced slices."""
        pieces, start = {}, 0
        for name, shape, boolean in self.fields:
            piece = buffer[start : start + math.prod(shape)].reshape(shape)
            pieces[name] = piece != 0 if boolean else piece
            start += math.prod(shape)
        return pieces

    def join(self, value) -> Array:
        """The buffer of a pytree of arrays with these field names (traced)."""
        pieces = [getattr(value, name) for name, _, _ in self.fields]
        return jnp.concatenate([piece.astype(jnp.int32).ravel() for piece in pieces])


def _layout_of(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> Layout:
    return Layout(
        tuple(
            (name, tuple(leaf.shape), leaf.dtype == np.bool_)
            for name, leaf in shapes.items()
        )
    )


def _fields(value: object) -> dict:
    return {
        field.name: getattr(value, field.name) for field in dataclasses.fields(value)
    }


class HostPlanner:
    """Plans from NumPy arrays: one compilation, one buffer each way.

    Write the requests into `requests[field]` and the limits into `limits[field]`
    (views of one buffer, field names as in `RequestTable` and `Budget`; booleans as 0
    or 1), then call `plan()`. Not for use from several threads at once.

    Args:
      config: static choices; rows are walked one by one where JAX runs on a CPU.
      num_rows: R, rows of the table; unused ones stay `Phase.EMPTY`.
      num_points: S, columns of `snapshot_points`.
      num_requested_points: C, columns of `requested_points`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        num_rows: int,
        num_points: int = 8,
        num_requested_points: int = 1,
    ):
        if jax.default_backend() == "cpu":
            config = dataclasses.replace(config, row_walk=RowWalk.SEQUENTIAL)
        columns = request_columns(
            [],
            num_rows=num_rows,
            num_points=num_points,
            num_requested_points=num_requested_points,
        )
        limits = {field.name: np.int32(1) for field in dataclasses.fields(Budget)}
        table = _layout_of({name: columns[name] for name in columns})
        budget = _layout_of(limits)
        self._buffer = np.zeros(table.size + budget.size, np.int32)
        self.requests = self._views(table, self._buffer[: table.size])
        self.limits = self._views(budget, self._buffer[table.size :])
        for name, column in columns.items():
            self.requests[name][...] = column
        for name, value in limits.items():
            self.limits[name][...] = value

        def run(buffer: Array) -> Plan:
            fields = table.split(buffer[: table.size])
            values = budget.split(buffer[table.size :])
            return schedule(RequestTable(**fields), Budget(**values), config)

        shape = jax.ShapeDtypeStruct(self._buffer.shape, jnp.int32)
        self._plan_layout = _layout_of(_fields(jax.eval_shape(run, shape)))
        layout = self._plan_layout
        self._compiled = jax.jit(lambda b: layout.join(run(b))).lower(shape).compile()

    @staticmethod
    def _views(layout: Layout, buffer: np.ndarray) -> dict[str, np.ndarray]:
        return Layout(
            tuple((name, shape, False) for name, shape, _ in layout.fields)
        ).split(buffer)

    def plan(self) -> Plan:
        """The plan of what the buffers hold, as NumPy arrays."""
        # The buffer may be read in place: the answer is awaited before it can change.
        answer = np.asarray(self._compiled(self._buffer))
        return Plan(**self._plan_layout.split(answer))
