"""Checks of a checkpoint folder: the served model against itself, against the plain
whole-sequence model, and against stored logits and states where the folder has them.

Paths that promise equal bits are compared bit for bit; the others within a tolerance.
"""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.models.batch import StepShape
from jaxsched.models.checkpoint import read_tensors
from jaxsched.models.comparison import Check, Comparison
from jaxsched.models.config import ModelConfig
from jaxsched.models.driver import Chunk, Driver, run_cuts
from jaxsched.models.families import with_chunk_size
from jaxsched.models.loading import load_checkpoint
from jaxsched.models.reference import run_reference
from jaxsched.models.serving import ServedModel

# Spread of the published implementation with itself (token by token against one pass)
# on small float32 models; shared blocks are applied often and spread most.
TOLERANCES = {"zamba2": 5e-5}
DEFAULT_TOLERANCE = 1e-5
# Three digits; where two experts are a rounding apart, a token may still go elsewhere.
BFLOAT16_TOLERANCE = 0.1

_MAX_CELLS = 64
_NUM_ROWS = 4


class FolderError(ValueError):
    """A folder that cannot be checked; its text is the one line that the user reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to check; `None` means: as the folder or its family says."""

    dtype: str = "float32"
    atol: float | None = None
    rtol: float | None = None
    chunk_size: int | None = None
    page_size: int = 8
    num_tokens: int = 37  # of a made-up sequence, where there is no tokens.npy
    num_schedules: int = 3
    seed: int = 0
    carry_tails: bool = True


def verify_folder(folder: str | Path, options: Options) -> tuple[ModelConfig, list]:
    """Loads a folder and runs every check.

    Raises:
      FolderError: if the folder cannot be loaded, or its arrays do not fit the model.
    """
    folder = Path(folder)
    try:
        config, parameters = load_checkpoint(folder, options.dtype)
        if options.chunk_size is not None:
            config = with_chunk_size(config, options.chunk_size)
    except ValueError as wrong:
        raise FolderError(str(wrong)) from wrong
    model = ServedModel(config, parameters, dtype=options.dtype)
    tokens = _tokens(folder, config, options)
    return config, list(Verifier(folder, model, parameters, tokens, options).run())


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError) as wrong:
        raise FolderError(f"{path}: not a numpy file: {wrong}") from wrong


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        return read_tensors(path)
    except ValueError as wrong:
        raise FolderError(str(wrong)) from wrong


def _tokens(folder: Path, config: ModelConfig, options: Options) -> np.ndarray:
    path = folder / "tokens.npy"
    if not path.is_file():
        made = np.random.default_rng(options.seed)
        return made.integers(0, config.vocab_size, (2, options.num_tokens), np.int32)
    tokens = _load(path)
    if tokens.ndim != 2 or tokens.dtype.kind != "i" or not tokens.size:
        shape = f"{tokens.dtype}{tokens.shape}"
        raise FolderError(
            f"{path}: must hold whole numbers [rows, tokens], got {shape}"
        )
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        right = f"token ids below vocab_size={config.vocab_size}"
        raise FolderError(f"{path}: must hold {right}, got {tokens.max()}")
    return tokens.astype(np.int32)


class Verifier:
    """Runs the checks of one model; logits of the uncut run are made once a row."""

    def __init__(self, folder, model, parameters, tokens, options):
        self.folder, self.model, self.options = folder, model, options
        self.tokens, self.random = tokens, random.Random(options.seed)
        config = model.config
        family = TOLERANCES.get(config.family, DEFAULT_TOLERANCE)
        if options.dtype == "bfloat16":
            family = BFLOAT16_TOLERANCE
        self.tolerance = (
            family if options.atol is None else options.atol,
            family if options.rtol is None else options.rtol,
        )
        self._parameters = parameters
        rows, length = tokens.shape
        chunk = config.mamba.chunk_size
        self.cells = min(-(-length // chunk) + 2, _MAX_CELLS)
        shape = StepShape(
            chunk_size=chunk,
            num_cells=self.cells,
            num_rows=_NUM_ROWS,
            carry_tails=options.carry_tails,
        )
        self.points = self._points(length, chunk)
        self.driver = Driver(
            model,
            shape,
            row_shape=dataclasses.replace(shape, num_cells=0),
            max_sequences=rows + 1,
            max_tokens=length,
            num_snapshots=2 * len(self.points),
            max_points=len(self.points),
            page_size=options.page_size,
        )
        self.whole: list[np.ndarray] = []

    def _points(self, length: int, chunk: int) -> list[int]:
        """Where snapshots are filed and restored: inside, on the grid and off it."""
        on_grid = {chunk, length // chunk * chunk}
        off_grid = {length // 3, length // 2 + 1, length - 1}
        points = on_grid | off_grid if self.options.carry_tails else on_grid
        return sorted(point for point in points if 0 < point < length)

    def run(self) -> Iterator[Check]:
        """Every check that applies, one after the other."""
        self.whole = [self._alone(row) for row in range(len(self.tokens))]
        yield self._against_reference()
        yield from self._against_stored_logits()
        yield from self._against_stored_states()
        yield self._grid_cuts()
        if self.options.carry_tails:
            yield self._random_cuts()
            yield self._one_token_chunks()
        yield self._filed_states()
        yield self._restored()
        yield self._decoded()
        yield self._batched()

    def _slots(self, first: int = 0) -> dict[int, int]:
        return {
            point: self.driver.snapshot_slot(first + index)
            for index, point in enumerate(self.points)
        }

    def _steps(self, begin: int, end: int) -> list[int]:
        """Ends of the fewest chunks that fit the step, on the grid."""
        span = (self.cells - 1) * self.model.config.mamba.chunk_size
        return [*range((begin // span + 1) * span, end, span), end]

    def _alone(self, row: int, length: int | None = None) -> np.ndarray:
        """Logits of a row, or of its beginning, in as few steps as it takes."""
        tokens = self.tokens[row][:length]
        self.driver.start(0, tokens)
        ends = self._steps(0, len(tokens))
        return run_cuts(self.driver, 0, ends, length=len(tokens), points=self._slots())

    def _against_reference(self) -> Check:
        found = Comparison("one_pass_vs_reference", self.tolerance)
        parameters = {n: jnp.asarray(value) for n, value in self._parameters.items()}
        run = jax.jit(lambda p, t: run_reference(self.model.config, p, t)[0])
        for row, tokens in enumerate(self.tokens):
            right = np.asarray(run(parameters, tokens))
            found.add(f"row {row}, [token, entry]", self.whole[row], right)
        return found.check()

    def _against_stored_logits(self) -> Iterator[Check]:
        path = self.folder / "logits.npy"
        if not (path.is_file() and (self.folder / "tokens.npy").is_file()):
            return
        stored = _load(path)
        right = (*self.tokens.shape, self.model.config.vocab_size)
        if stored.shape != right:
            raise FolderError(f"{path}: must be shaped {right}, got {stored.shape}")
        found = Comparison("one_pass_vs_logits.npy", self.tolerance)
        found.add("[row, token, entry]", np.stack(self.whole), stored)
        yield found.check()

    def _against_stored_states(self) -> Iterator[Check]:
        from jaxsched.models.stored_states import published_states

        files = {
            int(path.stem.removeprefix("snap_")): path
            for path in self.folder.glob("snap_*.safetensors")
            if path.stem.removeprefix("snap_").isdigit()
        }
        whole = self.folder / "states.safetensors"
        if whole.is_file():
            files[self.tokens.shape[1]] = whole
        if not (self.folder / "tokens.npy").is_file():
            return
        for point, path in sorted(files.items()):
            if not 0 < point <= self.tokens.shape[1]:
                raise FolderError(f"{path}: no position {point} in tokens.npy")
            found = Comparison(f"states_vs_{path.name}", self.tolerance)
            stored = _read(path)
            for row in range(len(self.tokens)):
                self._alone(row, point)
                own = published_states(self.driver, 0, 1)
                for name, right in stored.items():
                    if name not in own:
                        raise FolderError(f"{path}: {name} is no state of this model")
                    if len(right) != len(self.tokens):
                        rows = f"{len(self.tokens)} rows, got {len(right)}"
                        raise FolderError(f"{path}: {name} must have {rows}")
                    right = right[row]
                    if ".conv_state." in name:
                        # The oldest column stored is never read again.
                        right = right[:, 1:]
                    if right.shape != own[name].shape:
                        shape = f"shaped {own[name].shape} a row, got {right.shape}"
                        raise FolderError(f"{path}: {name} must be {shape}")
                    found.add(f"row {row}, {name}", own[name], right)
            yield found.check()

    def _cut(self, name: str, schedules: list[list[int]]) -> Check:
        found = Comparison(name, None)
        for row, tokens in enumerate(self.tokens):
            for ends in schedules:
                self.driver.start(0, tokens)
                got = run_cuts(self.driver, 0, ends, length=len(tokens))
                found.add(f"row {row}, ends {_short(ends)}", got, self.whole[row])
        return found.check()

    def _grid_cuts(self) -> Check:
        length, chunk = self.tokens.shape[1], self.model.config.mamba.chunk_size
        return self._cut("cuts_on_grid", [[*range(chunk, length, chunk), length]])

    def _random_cuts(self) -> Check:
        schedules = [self._random_ends() for _ in range(self.options.num_schedules)]
        return self._cut("random_cuts", schedules)

    def _random_ends(self) -> list[int]:
        length = self.tokens.shape[1]
        count = self.random.randint(1, min(8, length - 1)) if length > 1 else 0
        cuts = set(self.random.sample(range(1, length), count))
        return sorted(cuts | set(self._steps(0, length)))

    def _one_token_chunks(self) -> Check:
        length = min(self.tokens.shape[1], 4 * self.model.config.mamba.chunk_size)
        found = Comparison("one_token_chunks", None)
        self.driver.start(0, self.tokens[0][:length])
        got = run_cuts(self.driver, 0, range(1, length + 1), length=length)
        found.add("row 0, [token, entry]", got, self.whole[0][:length])
        return found.check()

    def _filed_states(self) -> Check:
        """States that one long chunk emits equal those that a chunk's end leaves."""
        found = Comparison("emitted_vs_cut_states", None)
        driver, length = self.driver, self.tokens.shape[1]
        for row, tokens in enumerate(self.tokens):
            self._alone(row)
            driver.start(1, tokens)
            cut = self._slots(len(self.points))
            ends = sorted({*self.points, *self._steps(0, length)})
            run_cuts(driver, 1, ends, length=length, points=cut)
            for point, slot in self._slots().items():
                emitted, left = driver.state(slot), driver.state(cut[point])
                for name, values in emitted.items():
                    where = f"row {row}, position {point}, {name}"
                    found.add(where, values, left[name])
        return found.check()

    def _restored(self) -> Check:
        found = Comparison("restored", None)
        length = self.tokens.shape[1]
        for row, tokens in enumerate(self.tokens):
            self._alone(row)
            for point, slot in self._slots().items():
                self.driver.restore(1, tokens, 0, point, slot)
                ends = self._steps(point, length)
                got = run_cuts(self.driver, 1, ends, length=length)
                where = f"row {row}, from {point}"
                found.add(where, got, self.whole[row][point:])
        return found.check()

    def _decode(self, row: int, prompt: int) -> np.ndarray:
        """Logits of the tokens from `prompt` on, fed one by one, alone."""
        self._alone(row, prompt)
        self.driver.extend(0, self.tokens[row])
        steps = range(prompt, self.tokens.shape[1])
        chunk = {0: Chunk(count=1, decode=True)}
        return np.concatenate([self.driver.step(chunk)[0] for _ in steps])

    def _decoded(self) -> Check:
        found = Comparison("decoded_vs_one_pass", self.tolerance)
        if self.tokens.shape[1] < 2:
            found.add("one token", self.whole[0], self.whole[0])
            return found.check()
        for row in range(len(self.tokens)):
            where = f"row {row}, [token - 1, entry]"
            found.add(where, self._decode(row, 1), self.whole[row][1:])
        return found.check()

    def _batched(self) -> Check:
        """All rows together at random paces, prefilling and decoding side by side."""
        from jaxsched.models.mixed_runs import run_mixed

        found = Comparison("batched", None)
        rows, length = self.tokens.shape
        for number in range(self.options.num_schedules):
            least = max(1, length // 2)
            prompts = [self.random.randint(least, length) for _ in range(rows)]
            alone = [
                np.concatenate(
                    [self.whole[row][:prompt], self._decode(row, prompt)]
                    if prompt < length
                    else [self.whole[row]]
                )
                for row, prompt in enumerate(prompts)
            ]
            unit = 1 if self.options.carry_tails else self.model.config.mamba.chunk_size
            places = self.random.sample(range(rows + 1), rows)
            got = run_mixed(
                self.driver, self.tokens, prompts, places, self.random, unit=unit
            )
            for row in range(rows):
                where = f"schedule {number}, row {row}, prompt {prompts[row]}"
                found.add(where, got[row], alone[row])
        return found.check()


def _short(ends: list[int]) -> str:
    return str(ends if len(ends) <= 6 else [*ends[:6], "..."])
