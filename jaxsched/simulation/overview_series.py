"""What an overview shows, as plain arrays: series over time, and times of requests."""

import dataclasses

import numpy as np

from jaxsched.simulation.goodput import tpot_of_requests
from jaxsched.simulation.metrics import metrics, request_report, ttft_ms
from jaxsched.simulation.replay import Replay
from jaxsched.simulation.replay_clock import NEVER_PS

_PS_PER_S = 1e12


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """Means over equal slices of time; S slices, N requests.

    Attributes:
      edges: f64[S + 1] seconds since the first arrival.
      prefill_per_s, decode_per_s: f64[S] tokens that were computed, a second.
      cached_per_s: f64[S] prompt tokens of the requests admitted in the slice that
        were not computed because the cache had them, a second.
      waiting, prefilling, decoding: f64[S] requests.
      budget_use: f64[S] scheduled share of the tokens that the steps could have held;
        NaN where no step ran, or where there is no budget.
      hit_share: f64[S] share of the prompt tokens of the requests admitted in the
        slice that the cache had; NaN where none was admitted.
      ttft_ms, tpot_ms: f64[N], NaN where there is none.
      prompt_tokens, cached_tokens: i64[N].
      figures: of `metrics`.
    """

    edges: np.ndarray
    prefill_per_s: np.ndarray
    decode_per_s: np.ndarray
    cached_per_s: np.ndarray
    waiting: np.ndarray
    prefilling: np.ndarray
    decoding: np.ndarray
    budget_use: np.ndarray
    hit_share: np.ndarray
    ttft_ms: np.ndarray
    tpot_ms: np.ndarray
    prompt_tokens: np.ndarray
    cached_tokens: np.ndarray
    figures: dict

    @property
    def middles(self) -> np.ndarray:
        """The middle of every slice, f64[S] seconds."""
        return (self.edges[1:] + self.edges[:-1]) / 2

    @property
    def has_hits(self) -> bool:
        """Whether the cache had anything."""
        return bool(np.any(self.cached_tokens > 0))


def series(run: Replay, num_slices: int = 240) -> Series:
    """Series of a run over equal slices from the first arrival to the last end."""
    ended = run.finish[run.finish != NEVER_PS]
    end = max(float(ended.max(initial=0)) / _PS_PER_S, 1e-9)
    edges = np.linspace(0.0, end, num_slices + 1)
    width = end / num_slices
    repeats = run.step_repeats
    arrival, admitted, first, finish = (
        np.where(times == NEVER_PS, np.nan, times / _PS_PER_S)
        for times in (run.arrival, run.admitted, run.first_token, run.finish)
    )
    prompts = np.array([r.num_prompt_tokens for r in run.workload.requests])
    cached = np.array([line["num_cached_tokens"] for line in request_report(run)])
    entered = ~np.isnan(admitted)
    at = admitted[entered]
    asked = np.histogram(at, edges, weights=prompts[entered])[0]
    had = np.histogram(at, edges, weights=cached[entered])[0]
    budget = run.config.max_num_batched_tokens
    prefill = _spread(run, run.step_prefill_tokens * repeats, edges)
    decode = _spread(run, run.step_decode_tokens * repeats, edges)
    steps = _spread(run, repeats, edges)
    with np.errstate(divide="ignore", invalid="ignore"):
        use = (
            (prefill + decode) / (steps * budget)
            if budget
            else np.full(len(had), np.nan)
        )
        hits = had / asked
    use[~np.isfinite(use)] = np.nan
    hits[~np.isfinite(hits)] = np.nan
    return Series(
        edges=edges,
        prefill_per_s=prefill / width,
        decode_per_s=decode / width,
        cached_per_s=had / width,
        waiting=_inside(arrival, np.fmin(admitted, finish), edges),
        prefilling=_inside(admitted, np.where(np.isnan(first), finish, first), edges),
        decoding=_inside(first, finish, edges),
        budget_use=use,
        hit_share=hits,
        ttft_ms=ttft_ms(run),
        tpot_ms=tpot_of_requests(run),
        prompt_tokens=prompts,
        cached_tokens=cached,
        figures=metrics(run),
    )


def _spread(run: Replay, amounts: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Amounts of the steps, each spread evenly over its time, by slice; f64[S]."""
    start = run.step_start / _PS_PER_S
    stop = start + run.step_duration / _PS_PER_S
    if not len(start):
        return np.zeros(len(edges) - 1)
    done = np.cumsum(amounts)
    times = np.stack([start, stop], axis=1).ravel()
    total = np.stack([done - amounts, done], axis=1).ravel()
    return np.diff(np.interp(edges, times, total, left=0.0))


def _inside(start: np.ndarray, stop: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Mean number of intervals that hold, by slice; f64[S]."""
    known = ~(np.isnan(start) | np.isnan(stop))

    def spent(times: np.ndarray) -> np.ndarray:
        """Seconds since each of some times, all together, at the edges."""
        times = np.sort(times)
        count = np.searchsorted(times, edges, side="right")
        sums = np.concatenate([[0.0], np.cumsum(times)])
        return count * edges - sums[count]

    held = spent(start[known]) - spent(stop[known])
    return np.maximum(np.diff(held) / np.diff(edges), 0.0)
