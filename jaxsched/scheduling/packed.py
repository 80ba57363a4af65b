"""Planning from the host with few buffers in and one buffer out.

A call of a compiled function costs a little for every array that goes in and more for
every array that comes out, and for small tables that is most of the time. So the
request table travels as one int32 array, its snapshot points as another, the budget as
a third, the plan as a fourth, and the caller sees named views of them.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.core.build import request_columns
from jaxsched.core.config import RowWalk, Rules, SchedulerConfig
from jaxsched.core.plan import Budget, Plan
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.row_by_row import Decisions, decide, plan_of
from jaxsched.scheduling.row_scans import Rows
from jaxsched.scheduling.scheduler import schedule

Array = jax.Array

_ALIGNMENT = 64
"""Bytes; NumPy arrays that start on a multiple of them are not copied on the way in."""

_LIMITS = tuple(field.name for field in dataclasses.fields(Budget))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each named array lies in the last axis of an int32 array; hashable."""

    fields: tuple[tuple[str, tuple[int, ...], bool], ...]  # name, shape, is boolean

    @classmethod
    def of(cls, arrays: Mapping) -> "Layout":
        """The layout of arrays, or of their shapes, one behind the other."""
        return cls(
            tuple(
                (name, tuple(leaf.shape), leaf.dtype == np.bool_)
                for name, leaf in arrays.items()
            )
        )

    @functools.cached_property
    def _places(self) -> tuple:
        """Name, slice of the axis, shape unless it is that of the slice, is boolean."""
        places, start = [], 0
        for name, shape, boolean in self.fields:
            stop = start + math.prod(shape)
            kept = None if len(shape) == 1 else shape
            places.append((name, slice(start, stop), kept, boolean))
            start = stop
        return tuple(places)

    @property
    def size(self) -> int:
        """Length of the axis."""
        return sum(math.prod(shape) for _, shape, _ in self.fields)

    def split(self, array) -> dict:
        """Named pieces of an array; NumPy views or traced slices."""
        pieces = {}
        for name, place, shape, boolean in self._places:
            piece = array[..., place]
            if shape is not None:
                piece = piece.reshape(piece.shape[:-1] + shape)
            pieces[name] = piece != 0 if boolean else piece
        return pieces

    def views(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Pieces that can be written to: booleans stay 0 or 1."""
        return Layout(tuple((n, s, False) for n, s, _ in self.fields)).split(array)

    def join(self, value: Mapping) -> Array:
        """The one-dimensional array of named arrays (traced)."""
        pieces = [value[name] for name, _, _ in self.fields]
        return jnp.concatenate([piece.astype(jnp.int32).ravel() for piece in pieces])


class PackedTable:
    """A request table and its limits as three int32 buffers with named views.

    Args:
      num_rows: R, rows of the table; unused ones stay `Phase.EMPTY`.
      num_points: S, columns of `snapshot_points`.
      num_requested_points: C, columns of `requested_points`.

    Attributes:
      requests, limits: views of the buffers, to be written to; field names as in
        `RequestTable` and `Budget`, booleans as 0 or 1.
      buffers: what is sent: i32[R, fields], i32[R, points], i32[limits].
    """

    def __init__(self, num_rows: int, num_points: int, num_requested_points: int):
        columns = request_columns(
            [],
            num_rows=num_rows,
            num_points=num_points,
            num_requested_points=num_requested_points,
        )
        first = {name: column[0] for name, column in columns.items()}
        # Scans stay one kernel each as long as the rows that they read are narrow.
        self._row = Layout.of({name: at for name, at in first.items() if at.ndim == 0})
        self._points = Layout.of({name: at for name, at in first.items() if at.ndim})
        rows = _aligned_zeros(num_rows, self._row.size)
        points = _aligned_zeros(num_rows, self._points.size)
        limits = np.ones(len(_LIMITS), np.int32)
        self.buffers = (rows, points, limits)
        self.requests = self._row.views(rows) | self._points.views(points)
        for name, column in columns.items():
            self.requests[name][...] = column
        self.limits = {
            name: limits[at : at + 1].reshape(()) for at, name in enumerate(_LIMITS)
        }

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of the buffers."""
        return [jax.ShapeDtypeStruct(b.shape, jnp.int32) for b in self.buffers]

    def plan(
        self, config: SchedulerConfig, rows: Array, points: Array, limits: Array
    ) -> Decisions | Plan:
        """What is decided of traced buffers, in the form that needs least work."""
        row_of, points_of = self._row, self._points
        table = RequestTable(**row_of.split(rows), **points_of.split(points))
        budget = Budget(**dict(zip(_LIMITS, limits, strict=True)))
        if config.row_walk != RowWalk.SEQUENTIAL or config.rules != Rules.JAXSCHED:
            return schedule(table, budget, config)

        def one_row(values: Array) -> RequestTable:
            no_points = {name: values[:0] for name, _, _ in points_of.fields}
            return RequestTable(**row_of.split(values), **no_points)

        return decide(table, budget, config, Rows(rows, one_row))


class HostPlanner:
    """Plans from NumPy arrays: one compilation, one buffer each way.

    Write the requests into `requests[field]` and the limits into `limits[field]`
    (views, field names as in `RequestTable` and `Budget`; booleans as 0 or 1), then
    call `plan()`. Not for use from several threads at once.

    Args:
      config: static choices; rows are walked one by one where JAX runs on a CPU.
      num_rows: R, rows of the table; unused ones stay `Phase.EMPTY`.
      num_points: S, columns of `snapshot_points`.
      num_requested_points: C, columns of `requested_points`.

    Attributes:
      requests, limits: what is planned, to be written to.
      compiled: the compiled program, to be looked at.
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
        packed = PackedTable(num_rows, num_points, num_requested_points)
        self.requests, self.limits = packed.requests, packed.limits
        self._buffers = packed.buffers

        def run(*buffers: Array) -> dict:
            found = packed.plan(config, *buffers)
            return found._asdict() if isinstance(found, Decisions) else fields(found)

        answer = jax.eval_shape(run, *packed.shapes)
        self._answer = layout = Layout.of(answer)
        self._in_decisions = "rows" in answer
        joined = jax.jit(lambda *buffers: layout.join(run(*buffers)))
        self.compiled = joined.lower(*packed.shapes).compile()

    def plan(self) -> Plan:
        """The plan of what the buffers hold, as NumPy arrays."""
        # The buffers may be read in place: the answer is awaited before they change.
        pieces = self._answer.split(np.asarray(self.compiled(*self._buffers)))
        return plan_of(Decisions(**pieces)) if self._in_decisions else Plan(**pieces)


def fields(value: object) -> dict:
    """The fields of a dataclass by name."""
    return {
        field.name: getattr(value, field.name) for field in dataclasses.fields(value)
    }


def _aligned_zeros(*shape: int) -> np.ndarray:
    size = math.prod(shape) * np.dtype(np.int32).itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(np.int32).reshape(shape)
