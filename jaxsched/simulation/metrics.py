"""What a replay amounts to: one flat dict of figures, and one line a request."""

from collections.abc import Iterator

import numpy as np

from jaxsched.cache.prefix import MissReason
from jaxsched.scheduling.snapshots import list_snapshot_points
from jaxsched.simulation.cache_state import CacheColumn
from jaxsched.simulation.replay import Replay
from jaxsched.simulation.replay_clock import NEVER_PS, PS_PER_MS
from jaxsched.simulation.replay_config import ReplayConfig
from jaxsched.simulation.replay_state import FinishReason
from jaxsched.simulation.workloads import Request

PERCENTILES = (50, 90, 99)
_PS_PER_S = 10**12


def metrics(run: Replay) -> dict[str, object]:
    """The figures of a replay, ready for JSON.

    Percentiles interpolate linearly between requests. `budget_use` is the mean share
    of the token budget that the steps scheduled (None without a budget), `busy` the
    share of the time in which a step ran. Figures of which there are none are None.
    """
    done = run.finish_reason == FinishReason.LENGTH
    steps = run.step_repeats
    prefill = int(np.sum(run.step_prefill_tokens * steps))
    decode = int(np.sum(run.step_decode_tokens * steps))
    num_steps = int(np.sum(steps))
    ended = run.finish[run.finish != NEVER_PS]
    duration = int(ended.max()) / _PS_PER_S if len(ended) else 0.0
    busy = int(np.sum(run.step_duration)) / _PS_PER_S
    outputs, prompts = int(run.num_output_tokens.sum()), prefill
    return {
        "workload": run.workload.name,
        "form": run.workload.form,
        "num_requests": len(run.workload.requests),
        "num_finished": int(np.sum(done)),
        "num_cancelled": int(np.sum(run.finish_reason == FinishReason.CANCELLED)),
        "num_refused": int(np.sum(run.finish_reason == FinishReason.REFUSED)),
        "num_dropped": run.workload.num_dropped,
        "duration_s": duration,
        "num_steps": num_steps,
        "num_chunks": len(run.chunk_end),
        "num_scheduled_tokens": prefill + decode,
        "num_prefill_tokens": prefill,
        "num_decode_tokens": decode,
        "num_output_tokens": outputs,
        **cache_metrics(run),
        "num_snapshots_due": num_snapshots_due(run),
        "num_snapshots_landed": int(np.sum(run.chunk_points >= 0)),
        **_spread("ttft_ms", ttft_ms(run)),
        **_spread("e2e_ms", e2e_ms(run)[done]),
        **_spread("queue_ms", _between(run.arrival, run.admitted)),
        **_spread("tpot_ms", _time_per_output_token(run, done)),
        "requests_per_s": _ratio(int(np.sum(done)), duration),
        "prompt_tokens_per_s": _ratio(prompts, duration),
        "output_tokens_per_s": _ratio(outputs, duration),
        "budget_use": _ratio(
            prefill + decode, num_steps * run.config.max_num_batched_tokens
        ),
        "busy": _ratio(busy, duration),
        "seqs_per_step": _ratio(int(np.sum(run.step_num_seqs * steps)), num_steps),
        "max_running": _most_running(run),
    }


def ttft_ms(run: Replay) -> np.ndarray:
    """Arrival to first token, f64[N] milliseconds, NaN where there is none."""
    return _between(run.arrival, run.first_token)


def e2e_ms(run: Replay) -> np.ndarray:
    """Arrival to the end, f64[N] milliseconds, NaN for refused requests."""
    return _between(run.arrival, run.finish)


def _between(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    known = end != NEVER_PS
    picoseconds = np.where(known, end - np.minimum(start, end), 0)
    return np.where(known, picoseconds.astype(np.float64) / PS_PER_MS, np.nan)


def _time_per_output_token(run: Replay, done: np.ndarray) -> np.ndarray:
    more = done & (run.num_output_tokens > 1)
    spent = _between(run.first_token, run.finish)[more]
    return spent / (run.num_output_tokens[more] - 1)


def _spread(name: str, values: np.ndarray) -> dict[str, float | None]:
    values = values[~np.isnan(values)]
    if not len(values):
        return {f"{name}_{part}": None for part in ("mean", "p50", "p90", "p99")}
    at = np.percentile(values, PERCENTILES)
    spread = {f"{name}_mean": float(values.mean())}
    for percentile, value in zip(PERCENTILES, at, strict=True):
        spread[f"{name}_p{percentile}"] = float(value)
    return spread


def _ratio(amount: float, base: float) -> float | None:
    return amount / base if base else None


def _most_running(run: Replay) -> int:
    """Most requests in the table at a time."""
    entered = run.admitted != NEVER_PS
    starts, ends = np.sort(run.admitted[entered]), np.sort(run.finish[entered])
    running = np.arange(1, len(starts) + 1) - np.searchsorted(ends, starts, "right")
    return int(running.max()) if len(running) else 0


def cache_metrics(run: Replay) -> dict[str, object]:
    """What the cache gave, and what it did not, and why.

    The token hit rate is over the prompts of the requests that were admitted. Lost are
    the tokens of a prompt that had once been computed, or are computed and stored
    without the state, and could have been reused; by the reason of the loss.
    """
    entered = run.admitted != NEVER_PS
    lengths = np.array([r.num_prompt_tokens for r in run.workload.requests])
    cached = run.note(CacheColumn.NUM_CACHED_TOKENS)
    lost = run.note(CacheColumn.NUM_SEEN_TOKENS) - cached
    reasons = run.note(CacheColumn.MISS_REASON)
    answers = run.note(CacheColumn.ANSWER_SNAPSHOT)
    prompts = int(np.sum(lengths[entered]))
    return {
        "num_prompt_tokens": prompts,
        "num_cached_tokens": int(cached.sum()),
        "token_hit_rate": _ratio(int(cached.sum()), prompts),
        "num_requests_hit": int(np.sum(cached > 0)),
        "lost_tokens": {
            reason.name.lower(): int(np.sum(lost[reasons == reason]))
            for reason in MissReason
            if reason != MissReason.NONE
        },
        "miss_reasons": {
            reason.name.lower(): int(np.sum(entered & (reasons == reason)))
            for reason in MissReason
        },
        "num_snapshots_filed": run.num_filed_snapshots,
        "num_answer_snapshots": int(np.sum(answers > 0)),
        "num_decode_snapshots": len(run.passed_point),
        "num_evicted_blocks": run.num_evicted_blocks,
        "num_evicted_snapshots": run.num_evicted_snapshots,
        "num_preemptions": int(run.note(CacheColumn.NUM_PREEMPTIONS).sum()),
        "num_recomputed_tokens": int(run.note(CacheColumn.NUM_RECOMPUTED_TOKENS).sum()),
    }


def num_snapshots_due(run: Replay) -> int:
    """Points, published or asked for by the cache, that the prefills have come up to.

    Those that a hit skips are not due; those that are computed again after a
    preemption are due again.
    """
    due = np.zeros(len(run.workload.requests), np.int64)
    if not run.config.prefix_caching:
        return 0
    starts, ends = _computed_runs(run)
    learned = run.notes[:, [CacheColumn.BRANCH_POINT, CacheColumn.GHOST_POINT]]
    for index, request in enumerate(run.workload.requests):
        extra = [int(point) for point in learned[index] if point > 0]
        for start, end in zip(starts[index], ends[index], strict=True):
            due[index] += _num_points(request, run.config, extra, start, end)
    return int(due.sum())


def _computed_runs(run: Replay) -> tuple[list[list[int]], list[list[int]]]:
    """Where each request's prefills began and ended: one run, or one a preemption."""
    size = len(run.workload.requests)
    starts: list[list[int]] = [[] for _ in range(size)]
    ends: list[list[int]] = [[] for _ in range(size)]
    for request, start, end in zip(
        run.chunk_request.tolist(),
        run.chunk_start.tolist(),
        run.chunk_end.tolist(),
        strict=True,
    ):
        if ends[request] and ends[request][-1] == start:
            ends[request][-1] = end
        else:
            starts[request].append(start)
            ends[request].append(end)
    return starts, ends


def _num_points(
    request: Request, config: ReplayConfig, extra: list[int], start: int, end: int
) -> int:
    """Points of one request in (start, end]."""
    # Periodic points are counted, not listed: there may be very many.
    interval = config.snapshot_interval
    explicit = list_snapshot_points(
        request.num_prompt_tokens,
        from_start=config.snapshot_from_start,
        from_end=config.snapshot_from_end,
        requested=[*request.snapshot_points, *extra],
        save_last=config.save_last,
        block_size=config.block_size,
    )
    if interval:
        explicit = [point for point in explicit if point % interval]
    # An answer that is computed again is cut at the periodic points alone.
    periodic = end // interval - start // interval if interval else 0
    return periodic + sum(start < point <= end for point in explicit)


def request_report(run: Replay) -> Iterator[dict[str, object]]:
    """One dict a request, in order of arrival, ready for JSON.

    `snapshots` are the positions that it stood on and at which the cache has had a
    state from then on, the end of its answer included; `answer_points` are the
    periodic ones inside its answer. What was matched is as of its first admission; a
    request that was never admitted has the reason None.
    """
    order = np.argsort(run.chunk_request, kind="stable")
    size = len(run.workload.requests)
    bounds = np.searchsorted(run.chunk_request[order], np.arange(size + 1))
    first, whole = ttft_ms(run), e2e_ms(run)
    notes = run.notes.tolist()
    passed: list[set[int]] = [set() for _ in range(size)]
    for request, point in zip(run.passed_request, run.passed_point, strict=True):
        passed[request].add(int(point))
    for index, request in enumerate(run.workload.requests):
        mine = order[bounds[index] : bounds[index + 1]]
        note, filed = notes[index], run.chunk_filed[mine]
        answer = note[CacheColumn.ANSWER_SNAPSHOT]
        points = {*filed[filed >= 0].tolist(), *([answer] if answer else [])}
        entered = run.admitted[index] != NEVER_PS
        reason = MissReason(note[CacheColumn.MISS_REASON]).name.lower()
        yield {
            "id": request.request_id,
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_cached_tokens": note[CacheColumn.NUM_CACHED_TOKENS],
            "num_kv_matched_tokens": note[CacheColumn.NUM_KV_MATCHED_TOKENS],
            "num_state_matched_tokens": note[CacheColumn.NUM_STATE_MATCHED_TOKENS],
            "miss_reason": reason if entered else None,
            "snapshots": sorted(points),
            "answer_points": sorted(passed[index]),
            "chunks": run.chunk_end[mine].tolist(),
            "num_preemptions": note[CacheColumn.NUM_PREEMPTIONS],
            "num_output_tokens": int(run.num_output_tokens[index]),
            "arrival_ms": int(run.arrival[index]) / PS_PER_MS,
            "ttft_ms": _or_none(first[index]),
            "e2e_ms": _or_none(whole[index]),
            "finish_reason": FinishReason(run.finish_reason[index]).name.lower(),
        }


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
