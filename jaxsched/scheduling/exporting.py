"""Planners as files: compiled ahead of time for several platforms, loaded untraced.

A file is a zip archive: `manifest.json` says for which choices and sizes it was made,
`programs/R.stablehlo` is the program for tables of R rows as `jax.export` serialises
it, with code for every platform in it. JAX promises to read such programs for at least
six months, and to run them on the platforms they name.
"""

import dataclasses
import functools
import json
import os
import zipfile
from collections.abc import Sequence

import jax
import numpy as np
from jax import export, lax

from jaxsched.core.config import RowWalk, SchedulerConfig
from jaxsched.core.host import check_count
from jaxsched.core.plan import Plan
from jaxsched.scheduling.packed import Layout, PackedTable, fields
from jaxsched.scheduling.row_by_row import Decisions, plan_of

PLATFORMS = ("cpu", "cuda")
_FORMAT = 1
_MAX_ROWS = 2**20
_MANIFEST = "manifest.json"
_KEYS = {"format", "config", "platforms", "num_points", "num_requested_points"}


class ExportError(ValueError):
    """A file that does not hold a planner, or not the one asked for; says why."""


def export_planner(
    path: str | os.PathLike,
    config: SchedulerConfig,
    rows: Sequence[int],
    *,
    num_points: int = 8,
    num_requested_points: int = 1,
    platforms: Sequence[str] = PLATFORMS,
) -> None:
    """Writes planners for tables of some sizes into one file.

    Args:
      path: of the file; replaced if it is there.
      config: static choices. On a CPU rows are walked one by one, elsewhere as
        `config.row_walk` says; the plans are the same.
      rows: R, the sizes of tables; each is a program of its own.
      num_points: S, columns of `snapshot_points`.
      num_requested_points: C, columns of `requested_points`.
      platforms: names of JAX platforms; every program runs on all of them.

    Raises:
      ValueError: if a size or a platform is not possible.
      OSError: if the file cannot be written.
    """
    check_count("num_points", num_points, low=1)
    check_count("num_requested_points", num_requested_points, low=1)
    for size in rows:
        check_count("rows", size, low=1, high=_MAX_ROWS)
    if not rows or len(set(rows)) < len(rows):
        raise ValueError(f"rows must be different sizes, got {list(rows)}")
    manifest = {
        "format": _FORMAT,
        "config": dataclasses.asdict(config),
        "platforms": list(platforms),
        "num_points": num_points,
        "num_requested_points": num_requested_points,
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_MANIFEST, json.dumps(manifest))
        for size in sorted(rows):
            packed = PackedTable(size, num_points, num_requested_points)
            program = _program(packed, config)
            exported = export.export(program, platforms=platforms)(*packed.shapes)
            archive.writestr(_name(size), bytes(exported.serialize()))


def _program(packed: PackedTable, config: SchedulerConfig):
    """Packed buffers to the packed plan, the best walk of each platform in one."""

    def run(walk: RowWalk, *buffers: jax.Array) -> jax.Array:
        found = packed.plan(dataclasses.replace(config, row_walk=walk), *buffers)
        plan = plan_of(found) if isinstance(found, Decisions) else found
        named = fields(plan)
        return Layout.of(named).join(named)

    return jax.jit(
        lambda *buffers: lax.platform_dependent(
            *buffers,
            cpu=functools.partial(run, RowWalk.SEQUENTIAL),
            default=functools.partial(run, config.row_walk),
        )
    )


class ExportedPlanner:
    """Planners read from a file of `export_planner`.

    Args:
      path: of the file.

    Attributes:
      config: the static choices that it was made with.
      rows: the sizes of tables that it has programs for, ascending.
      platforms: where they run.

    Raises:
      ExportError: naming the file, if it is not whole, not of this kind or version.
      OSError: if the file cannot be read.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = os.fspath(path)
        try:
            with zipfile.ZipFile(path) as archive:
                manifest = json.loads(archive.read(_MANIFEST))
                self._programs = {
                    _size(name): archive.read(name)
                    for name in archive.namelist()
                    if name != _MANIFEST
                }
            self._check(manifest)
            self.config = SchedulerConfig(**manifest["config"])
        except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as wrong:
            raise ExportError(f"{self._path}: not a planner file: {wrong}") from wrong
        self.rows = tuple(sorted(self._programs))
        self.platforms = tuple(manifest["platforms"])
        self._sizes = (manifest["num_points"], manifest["num_requested_points"])

    @staticmethod
    def _check(manifest: object) -> None:
        if not isinstance(manifest, dict) or not manifest.keys() >= _KEYS:
            raise ValueError(f"{_MANIFEST} lacks entries")
        if manifest["format"] != _FORMAT:
            raise ValueError(f"format {manifest['format']!r}, {_FORMAT} can be read")

    def planner(self, num_requests: int) -> "LoadedPlanner":
        """The planner of the smallest tables that hold so many requests.

        Raises:
          ExportError: if no program is large enough, or none for this platform.
        """
        enough = [size for size in self.rows if size >= num_requests]
        if not enough:
            raise ExportError(
                f"{self._path}: tables of at most {self.rows[-1]} rows, "
                f"{num_requests} requests do not fit"
            )
        here = jax.default_backend()
        # JAX calls every NVIDIA and AMD GPU "gpu"; programs name the kind.
        names = {"gpu": ("cuda", "rocm")}.get(here, (here,))
        if not set(names) & set(self.platforms):
            raise ExportError(
                f"{self._path}: made for {', '.join(self.platforms)}, this is {here}"
            )
        size = enough[0]
        try:
            program = export.deserialize(bytearray(self._programs[size]))
        except Exception as wrong:  # whatever the reader of the format raises
            raise ExportError(
                f"{self._path}: {_name(size)} cannot be read: {wrong}"
            ) from wrong
        return LoadedPlanner(program, PackedTable(size, *self._sizes), self.config)


class LoadedPlanner:
    """Plans with a program from a file; used like `HostPlanner`.

    Attributes:
      requests, limits: what is planned, to be written to (see `HostPlanner`).
    """

    def __init__(
        self, program: export.Exported, packed: PackedTable, config: SchedulerConfig
    ):
        self.requests, self.limits = packed.requests, packed.limits
        self._buffers = packed.buffers
        num_rows = packed.buffers[0].shape[0]
        self._answer = plan_layout(num_rows, config.num_emit_columns)
        self._call = jax.jit(program.call).lower(*packed.shapes).compile()

    def plan(self) -> Plan:
        """The plan of what the buffers hold, as NumPy arrays."""
        answer = np.asarray(self._call(*self._buffers))
        return Plan(**self._answer.split(answer))


def plan_layout(num_rows: int, num_emit_columns: int) -> Layout:
    """Where the fields of a `Plan` of so many rows lie in a packed one."""
    by_row, one = (num_rows,), ()
    shapes = {
        "emit_points": (num_rows, num_emit_columns),
        **dict.fromkeys(("num_seqs", "num_batched_tokens", "error"), one),
    }
    masks = ("is_last_chunk", "prefill_mask", "decode_mask", "encode_mask")
    masks += ("preempted_mask",)
    names = [field.name for field in dataclasses.fields(Plan)]
    return Layout(
        tuple((name, shapes.get(name, by_row), name in masks) for name in names)
    )


def _name(size: int) -> str:
    return f"programs/{size}.stablehlo"


def _size(name: str) -> int:
    size = name.removeprefix("programs/").removesuffix(".stablehlo")
    if _name(int(size)) != name:
        raise ValueError(f"unknown entry {name!r}")
    return int(size)
