"""From a roofline to the few numbers of an integer clock, and how far off they are.

A replay adds whole picoseconds: a base and so much for every token, row and pair. Such
a line cannot follow the bends of a roofline; it is fitted over the steps that a server
takes, and says how large the error is there.
"""

import dataclasses
import itertools

import numpy as np

from jaxsched.core.host import check_count
from jaxsched.simulation.costs import (
    StepCosts,
    StepLoad,
    pairs_of_chunk,
    step_times_us,
    step_us,
)
from jaxsched.simulation.costs_operators import CostClass

PS_PER_US = 10**6
_MAX_PS = 2**32 - 1
_MAX_CHUNKS = 4
_MAX_SNAPSHOTS = 4
_NUM_PLACES = 48
_OF_TOKENS = (
    CostClass.GEMM,
    CostClass.EXPERTS,
    CostClass.ELEMENTWISE,
    CostClass.COLLECTIVE,
    CostClass.OVERHEAD,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatingRange:
    """The steps over which a line is fitted.

    A quarter of the steps only decode, a quarter only prefill, half do both.

    Attributes:
      max_tokens: most tokens of a step.
      max_rows: most decode rows.
      max_context: longest sequence, tokens.
      snapshots: whether steps write snapshots.
      num_steps: how many steps are drawn.
      seed: any integer.
    """

    max_tokens: int = 8192
    max_rows: int = 256
    max_context: int = 32768
    snapshots: bool = True
    num_steps: int = 4096
    seed: int = 0

    def __post_init__(self):
        for name in ("max_tokens", "max_rows", "max_context"):
            check_count(name, getattr(self, name), low=1)
        check_count("num_steps", self.num_steps, low=64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCosts:
    """A step takes the sum of its counts times these; errors are |line / roof - 1|.

    The unit is in the name; `..._error` are shares over the steps of the range.
    """

    base_us: float
    prefill_token_us: float
    decode_row_us: float
    context_token_ns: float
    token_pair_ns: float
    snapshot_us: float
    median_error: float
    p90_error: float
    max_error: float

    def picoseconds(self) -> dict[str, int]:
        """Whole picoseconds by name: base, prefill_token, decode_row, context_token,
        token_pair, snapshot.

        Raises:
          ValueError: if one but the base does not fit into 32 bits (4.29 ms).
        """
        found = {
            "base": round(self.base_us * PS_PER_US),
            "prefill_token": round(self.prefill_token_us * PS_PER_US),
            "decode_row": round(self.decode_row_us * PS_PER_US),
            "context_token": round(self.context_token_ns * 1000),
            "token_pair": round(self.token_pair_ns * 1000),
            "snapshot": round(self.snapshot_us * PS_PER_US),
        }
        for name, value in found.items():
            if name != "base" and value > _MAX_PS:
                raise ValueError(
                    f"{name} must be at most {_MAX_PS} picoseconds, got {value}"
                )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class TabledCosts:
    """A base by the tokens of the step, and the rest as in `LinearCosts`.

    Between two entries of the table the base is interpolated. While only decodes run
    the number of tokens does not change, so a jump over such steps stays exact.
    """

    tokens: tuple[int, ...]
    base_us: tuple[float, ...]
    prefill_token_us: float
    decode_row_us: float
    context_token_ns: float
    token_pair_ns: float
    snapshot_us: float
    median_error: float
    p90_error: float
    max_error: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayLine:
    """The three numbers of a replay's cost line; errors as in `LinearCosts`."""

    step_ms: float
    token_us: float
    context_ns: float
    median_error: float
    p90_error: float
    max_error: float


def linear_costs(
    costs: StepCosts, steps: OperatingRange = OperatingRange()
) -> LinearCosts:
    """The line nearest to the roofline over a range of steps.

    Least squares of relative errors, no coefficient below 0.

    Args:
      costs: the model on its hardware.
      steps: the range.
    """
    load, _ = draw_steps(steps)
    snapshot = snapshot_us(costs)
    time = step_us(costs, load)
    known = snapshot * load.snapshots_written
    found, errors = _fit([np.ones_like(time), *_counts(load)], time, known)
    return LinearCosts(
        base_us=found[0], **_named(found[1:]), snapshot_us=snapshot, **errors
    )


def tabled_costs(
    costs: StepCosts, steps: OperatingRange = OperatingRange()
) -> TabledCosts:
    """Like `linear_costs`, with a base that follows the number of tokens.

    What depends on the tokens of a step alone (matrix products, experts, norms,
    collectives, the host's overhead) is tabulated; only the rest is a line.

    Args:
      costs: the model on its hardware.
      steps: the range; the table reaches up to its most tokens.
    """
    load, _ = draw_steps(steps)
    tokens = load.prefill_tokens + load.decode_rows
    places = np.unique(np.geomspace(1, steps.max_tokens, _NUM_PLACES).round())
    base = _tokens_alone(costs, places)
    snapshot = snapshot_us(costs)
    known = np.interp(tokens, places, base) + snapshot * load.snapshots_written
    found, errors = _fit(_counts(load), step_us(costs, load), known)
    return TabledCosts(
        tokens=tuple(places.astype(int).tolist()),
        base_us=tuple(base.tolist()),
        **_named(found),
        snapshot_us=snapshot,
        **errors,
    )


def snapshot_us(costs: StepCosts) -> float:
    """Microseconds to write one snapshot; 0 for models without a state."""
    one = StepLoad(snapshots_written=np.ones(1), num_chunks=np.zeros(1))
    return float(step_times_us(costs, one).get(CostClass.SNAPSHOT, np.zeros(1))[0])


def _tokens_alone(costs: StepCosts, tokens: np.ndarray) -> np.ndarray:
    times = step_times_us(costs, StepLoad(prefill_tokens=tokens))
    return sum(times[kind] for kind in _OF_TOKENS if kind in times)


def _counts(load: StepLoad) -> list[np.ndarray]:
    return [
        load.prefill_tokens,
        load.decode_rows,
        load.context_tokens,
        load.token_pairs,
    ]


def _named(found: list[float]) -> dict[str, float]:
    token, row, context, pair = found
    return {
        "prefill_token_us": token,
        "decode_row_us": row,
        "context_token_ns": context * 1000,
        "token_pair_ns": pair * 1000,
    }


def replay_line(costs: StepCosts, steps: OperatingRange = OperatingRange()):
    """The three numbers of `ReplayConfig`, for replays that know no others.

    Args:
      costs: the model on its hardware.
      steps: the range; what snapshots cost cannot be told, so it is left out.
    """
    load, chunk_ends = draw_steps(dataclasses.replace(steps, snapshots=False))
    columns = [
        np.ones_like(load.prefill_tokens),
        load.prefill_tokens + load.decode_rows,
        load.context_tokens + chunk_ends,
    ]
    (base, token, context), errors = _fit(columns, step_us(costs, load))
    return ReplayLine(
        step_ms=base / 1000, token_us=token, context_ns=context * 1000, **errors
    )


def draw_steps(steps: OperatingRange) -> tuple[StepLoad, np.ndarray]:
    """Random steps of a range, f64[num_steps], and the sum of their chunks' ends."""
    draw = np.random.default_rng(steps.seed)
    size = steps.num_steps
    kind = np.arange(size) % 4
    decodes, prefills = kind != 0, kind != 1

    def log_uniform(low: float, high: np.ndarray | float) -> np.ndarray:
        high = np.maximum(high, low)
        return np.floor(np.exp(draw.uniform(np.log(low), np.log(high), size)))

    rows = log_uniform(1, min(steps.max_rows, steps.max_tokens)) * decodes
    context = rows * log_uniform(1, steps.max_context)
    room = np.maximum(steps.max_tokens - rows, 1)
    chunks = np.where(prefills, draw.integers(1, _MAX_CHUNKS + 1, size), 0)
    tokens = np.maximum(log_uniform(1, room), chunks) * prefills
    each = tokens / np.maximum(chunks, 1)
    start = log_uniform(1, np.maximum(steps.max_context - each, 1)) - 1
    start *= prefills & (draw.random(size) < 0.5)  # half of the prompts just begin
    written = draw.integers(0, _MAX_SNAPSHOTS + 1, size) * prefills * steps.snapshots
    load = StepLoad(
        prefill_tokens=tokens.astype(np.float64),
        decode_rows=rows.astype(np.float64),
        context_tokens=context.astype(np.float64),
        token_pairs=chunks * pairs_of_chunk(start, each),
        num_chunks=chunks.astype(np.float64),
        snapshots_written=np.minimum(written, chunks).astype(np.float64),
        snapshots_restored=np.zeros(size),
    )
    return load, chunks * (start + each)


def _fit(
    columns: list[np.ndarray], time: np.ndarray, known: np.ndarray | float = 0.0
) -> tuple[list[float], dict[str, float]]:
    """Coefficients >= 0 of least relative squares: every subset of them is tried.

    `known` is a part of the time that is added as it is.
    """
    matrix = np.stack(columns, axis=1) / time[:, None]
    wanted = 1.0 - known / time
    scale = np.linalg.norm(matrix, axis=0)
    matrix = matrix / np.where(scale > 0, scale, 1.0)
    best, found = float(wanted @ wanted), np.zeros(len(columns))
    for chosen in itertools.product((False, True), repeat=len(columns)):
        mask = np.array(chosen)
        if not mask.any() or np.any(scale[mask] == 0):
            continue
        values = np.linalg.lstsq(matrix[:, mask], wanted, rcond=None)[0]
        left = float(np.sum((matrix[:, mask] @ values - wanted) ** 2))
        if np.all(values >= 0) and left < best:
            best, found = left, np.zeros(len(columns))
            found[mask] = values
    errors = np.abs(matrix @ found - wanted)
    middle, most = np.quantile(errors, [0.5, 0.9])
    return (found / np.where(scale > 0, scale, 1.0)).tolist(), {
        "median_error": float(middle),
        "p90_error": float(most),
        "max_error": float(errors.max()),
    }
