"""A replay as trace events, to be opened in Perfetto (ui.perfetto.dev) or in Chrome.

Trace Event Format: an object with a list of events; times are microseconds. One
process shows the steps and what they carried, the other one the requests.
"""

import heapq
from collections.abc import Iterator

import numpy as np

from jaxsched.simulation.replay import Replay
from jaxsched.simulation.replay_clock import NEVER_PS
from jaxsched.simulation.replay_state import FinishReason

MAX_TRACKS = 500
"""Requests with a track of their own; where there are more they share tracks."""

_STEPS, _REQUESTS = 1, 2  # process ids
_PS_PER_NS = 1000
_NS_PER_US = 1000


def trace_events(run: Replay) -> dict[str, object]:
    """The whole run, ready for JSON.

    A request is a slice from its arrival to its end; in it are its wait, the chunks of
    its prompt and its decode stretch, and snapshots are instants. Where there are more
    than `MAX_TRACKS` requests, each takes the first track that is free.
    """
    events = [
        *_process(_STEPS, "scheduler"),
        *_process(_REQUESTS, "requests"),
        *_thread(_STEPS, 1, "steps"),
        *_step_events(run),
    ]
    tracks = _tracks(run)
    named = len(tracks) <= MAX_TRACKS
    for track in sorted(set(tracks.tolist())):
        name = f"track {track}"
        if named:
            name = str(run.workload.requests[track].request_id)
        events += _thread(_REQUESTS, track + 1, name)
    events += _request_events(run, tracks)
    events += _chunk_events(run, tracks)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"workload": run.workload.name, "num_requests": len(tracks)},
        "traceEvents": events,
    }


def _process(pid: int, name: str) -> Iterator[dict]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    sort = {"sort_index": pid}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": sort}


def _thread(pid: int, tid: int, name: str) -> Iterator[dict]:
    common = {"ph": "M", "pid": pid, "tid": tid}
    yield {**common, "name": "thread_name", "args": {"name": name}}
    yield {**common, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _slice(pid: int, tid: int, name: str, start: int, end: int, **args) -> dict:
    """A slice between two times in nanoseconds."""
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "ts": start / _NS_PER_US,
        "dur": (end - start) / _NS_PER_US,
        "args": args,
    }


def _nanoseconds(times: np.ndarray) -> list[int]:
    return (times // np.uint64(_PS_PER_NS)).tolist()


def _step_events(run: Replay) -> Iterator[dict]:
    start = _nanoseconds(run.step_start)
    end = _nanoseconds(run.step_start + run.step_duration)
    columns = (
        run.step_repeats,
        run.step_prefill_tokens,
        run.step_decode_tokens,
        run.step_num_seqs,
    )
    last = 0
    for at, row in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
        repeats, prefill, decode, rows = row
        name = "step" if repeats == 1 else f"{repeats} steps"
        yield _slice(
            *(_STEPS, 1, name, start[at], end[at]),
            steps=repeats,
            prefill_tokens=prefill,
            decode_tokens=decode,
            requests=rows,
        )
        if start[at] > last:
            yield _tokens(last, 0, 0)
        yield _tokens(start[at], prefill, decode)
        last = end[at]
    yield _tokens(last, 0, 0)


def _tokens(at: int, prefill: int, decode: int) -> dict:
    return {
        "ph": "C",
        "pid": _STEPS,
        "name": "tokens a step",
        "ts": at / _NS_PER_US,
        "args": {"prefill": prefill, "decode": decode},
    }


def _tracks(run: Replay) -> np.ndarray:
    """The track of each request, i64[N]: its own, or the first one that is free."""
    size = len(run.arrival)
    if size <= MAX_TRACKS:
        return np.arange(size)
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    tracks = np.zeros(size, np.int64)
    arrival, ends = run.arrival.tolist(), run.finish.tolist()
    for index in np.argsort(run.arrival, kind="stable").tolist():
        while busy and busy[0][0] <= arrival[index]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        track = heapq.heappop(free) if free else len(busy)
        tracks[index] = track
        # Who never ends holds its track no longer than the instant it came.
        end = arrival[index] if ends[index] == NEVER_PS else ends[index]
        heapq.heappush(busy, (end, track))
    return tracks


def _request_events(run: Replay, tracks: np.ndarray) -> Iterator[dict]:
    times = zip(
        _nanoseconds(run.arrival),
        _nanoseconds(run.admitted),
        _nanoseconds(run.first_token),
        _nanoseconds(run.finish),
        strict=True,
    )
    never = NEVER_PS // _PS_PER_NS
    for index, (arrival, admitted, first, finish) in enumerate(times):
        request, track = run.workload.requests[index], int(tracks[index]) + 1
        reason = FinishReason(run.finish_reason[index]).name.lower()
        if finish == never:
            yield _instant(track, f"{request.request_id}: {reason}", arrival)
            continue
        yield _slice(
            *(_REQUESTS, track, str(request.request_id), arrival, finish),
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=int(run.num_output_tokens[index]),
            finish_reason=reason,
        )
        left = min(admitted, finish)
        if left > arrival:
            yield _slice(_REQUESTS, track, "waiting", arrival, left)
        if first < finish:
            tokens = int(run.num_output_tokens[index]) - 1
            yield _slice(
                _REQUESTS, track, "decode", first, finish, output_tokens=tokens
            )


def _chunk_events(run: Replay, tracks: np.ndarray) -> Iterator[dict]:
    step = run.chunk_step
    start = _nanoseconds(run.step_start[step])
    end = _nanoseconds(run.step_start[step] + run.step_duration[step])
    for at, request in enumerate(run.chunk_request.tolist()):
        track = int(tracks[request]) + 1
        first, last = int(run.chunk_start[at]), int(run.chunk_end[at])
        yield _slice(
            *(_REQUESTS, track, f"prefill {last - first}", start[at], end[at]),
            start_token=first,
            end_token=last,
        )
        for point in run.chunk_points[at].tolist():
            if point >= 0:
                yield _instant(track, "snapshot", end[at], token=point)


def _instant(track: int, name: str, at: int, **args) -> dict:
    return {
        "ph": "i",
        "s": "t",
        "pid": _REQUESTS,
        "tid": track,
        "name": name,
        "ts": at / _NS_PER_US,
        "args": args,
    }
