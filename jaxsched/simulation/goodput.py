"""How many requests were served well enough, and how long requests queued."""

import math
import numbers

import numpy as np

from jaxsched.simulation.replay import Replay
from jaxsched.simulation.replay_clock import NEVER_PS, PS_PER_MS
from jaxsched.simulation.replay_state import FinishReason

PERCENTILES = (50, 90, 95, 99)
_PS_PER_S = 10**12


def goodput(
    run: Replay,
    *,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    e2e_ms: float | None = None,
) -> dict[str, object]:
    """Requests that finished within limits, ready for JSON.

    A request with one output token has no time per output token and keeps that limit.
    Rates are over the whole run, from the first arrival to the last end. A request
    that breaks several limits counts for each of them.

    Args:
      run: what happened.
      ttft_ms: most milliseconds from arrival to the first token; None: no limit.
      tpot_ms: most milliseconds per output token after the first, on average.
      e2e_ms: most milliseconds from arrival to the end.

    Raises:
      ValueError: if a limit is not above 0.
    """
    limits = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_ms": e2e_ms}
    for name, limit in limits.items():
        _check_limit(name, limit)
    done = run.finish_reason == FinishReason.LENGTH
    outputs = np.asarray(run.num_output_tokens)
    times = {
        "ttft_ms": _milliseconds(run.arrival, run.first_token),
        "tpot_ms": tpot_of_requests(run),
        "e2e_ms": _milliseconds(run.arrival, run.finish),
    }
    good, broken = done.copy(), {}
    for name, limit in limits.items():
        # NaN is never above a limit: those that have no such time keep it.
        late = done & (times[name] > (math.inf if limit is None else limit))
        broken[name] = int(np.sum(late))
        good &= ~late
    ended = run.finish[run.finish != NEVER_PS]
    seconds = int(ended.max()) / _PS_PER_S if len(ended) else 0.0
    number = int(np.sum(good))
    return {
        "limits": limits,
        "num_requests": len(done),
        "num_finished": int(np.sum(done)),
        "num_good": number,
        "num_too_late": broken,
        "good_share": number / len(done),
        "good_requests_per_s": number / seconds if seconds else None,
        "good_output_tokens_per_s": (
            int(np.sum(outputs[good])) / seconds if seconds else None
        ),
    }


def tpot_of_requests(run: Replay) -> np.ndarray:
    """Milliseconds per output token after the first, f64[N], NaN where none is."""
    known = (run.finish_reason == FinishReason.LENGTH) & (run.num_output_tokens > 1)
    spent = _milliseconds(run.first_token, run.finish)
    after_first = np.where(known, run.num_output_tokens - 1, 1)
    return np.where(known, spent / after_first, np.nan)


def queueing(run: Replay) -> dict[str, float | int | None]:
    """How long requests waited and how many did at a time, ready for JSON.

    `wait_ms_...` is from arrival to admission, of the requests that were admitted.
    `depth_...` is the number that wait, over time: percentiles say what it is below
    for that share of the time from the first arrival to the last end.
    """
    waits = _milliseconds(run.arrival, run.admitted)
    waits = waits[~np.isnan(waits)]
    depth, lasts = queue_depth(run)
    found: dict[str, float | int | None] = {
        "wait_ms_mean": float(waits.mean()) if len(waits) else None,
        "num_never_admitted": int(np.sum(run.admitted == NEVER_PS)),
        "depth_mean": None,
        "depth_max": int(depth.max(initial=0)),
    }
    for percentile in PERCENTILES:
        at = float(np.percentile(waits, percentile)) if len(waits) else None
        found[f"wait_ms_p{percentile}"] = at
        found[f"depth_p{percentile}"] = None
    total = float(lasts.sum())
    if total:
        found["depth_mean"] = float((depth * lasts).sum() / total)
        order = np.argsort(depth, kind="stable")
        reached = np.cumsum(lasts[order]) / total
        for percentile in PERCENTILES:
            at = int(np.searchsorted(reached, percentile / 100 - 1e-12))
            found[f"depth_p{percentile}"] = int(depth[order][min(at, len(order) - 1)])
    return found


def queue_depth(run: Replay) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of waiting requests, i64[E], and the seconds that each lasted, f64[E]."""
    ended = np.minimum(run.admitted, run.finish)
    waited = (ended != NEVER_PS) & (ended > run.arrival)
    times = np.concatenate([run.arrival[waited], ended[waited]])
    change = np.repeat([1, -1], int(np.sum(waited)))
    last = run.finish[run.finish != NEVER_PS].max(initial=0)
    edges = np.concatenate([[0], times, [last]]).astype(np.float64) / _PS_PER_S
    change = np.concatenate([[0], change, [0]])
    order = np.argsort(edges, kind="stable")
    depth = np.cumsum(change[order])[:-1]
    return depth, np.diff(edges[order])


def _milliseconds(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    known = (start != NEVER_PS) & (end != NEVER_PS)
    spent = np.where(known, end - np.minimum(start, end), 0)
    return np.where(known, spent.astype(np.float64) / PS_PER_MS, np.nan)


def _check_limit(name: str, limit: object) -> None:
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, numbers.Real):
        raise ValueError(f"{name} must be a number or None, got {limit!r}")
    if not limit > 0:
        raise ValueError(f"{name} must be above 0, got {limit!r}")
