"""Workloads as files of the `segments` form, at another rate, and in figures."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from fractions import Fraction

from jaxsched.core.config import NO_ID
from jaxsched.simulation.workloads import Request, Span, Workload, WorkloadError

_NS_PER_MS = 10**6
_NS_PER_S = 10**9


def segment_lines(workload: Workload) -> Iterator[str]:
    """A workload as JSON lines of the `segments` form, without line ends.

    What is read from them is the same workload: arrivals, lengths, and which tokens
    are the same.

    Raises:
      WorkloadError: if token ids were given (they have a form of their own), or a
        prompt begins in the middle of a stream, which segments cannot say.
    """
    answers = {r.answer.stream: r.request_id for r in workload.requests}
    for request in workload.requests:
        segments = []
        for span in request.prompt:
            if span.stream in workload.literals:
                raise WorkloadError(
                    f"{request.where}: token ids were given: segments cannot hold them"
                )
            if span.start:
                raise WorkloadError(
                    f"{request.where}: a prompt begins at token {span.start} of what "
                    "it shares: segments always begin at the first"
                )
            name = f"s{span.stream}"
            if span.stream in answers:
                name = f"answer:{answers[span.stream]}"
            segments.append([name, span.length])
        yield json.dumps(_fields(request, segments), ensure_ascii=False)


def _fields(request: Request, segments: list) -> dict[str, object]:
    fields: dict[str, object] = {
        "id": request.request_id,
        "timestamp": _milliseconds(request.arrival_ns),
        "input_length": request.num_prompt_tokens,
        "output_length": request.max_new_tokens,
        "segments": segments,
    }
    if request.snapshot_points:
        fields["snapshot_points"] = list(request.snapshot_points)
    if request.priority:
        fields["priority"] = request.priority
    if request.lora_id != NO_ID:
        fields["lora_id"] = request.lora_id
    if request.cancel_at_ns is not None:
        fields["cancel_at"] = _milliseconds(request.cancel_at_ns)
    return fields


def _milliseconds(nanoseconds: int) -> int | float:
    whole, rest = divmod(nanoseconds, _NS_PER_MS)
    return nanoseconds / _NS_PER_MS if rest else whole


def scaled_to_rate(workload: Workload, requests_per_second: float) -> Workload:
    """The same requests at another average rate; the first arrives when it did.

    The rate is that of the gaps: one less than the requests, over the time between
    the first and the last arrival. How long clients wait before they give up does not
    change.

    Raises:
      WorkloadError: if the rate is not above 0, or all requests arrive at once.
    """
    target = requests_per_second
    if isinstance(target, bool) or not isinstance(target, int | float):
        raise WorkloadError(f"requests_per_second must be a number, got {target!r}")
    if not 0 < target < float("inf"):
        raise WorkloadError(f"requests_per_second must be above 0, got {target!r}")
    first, last = (workload.requests[at].arrival_ns for at in (0, -1))
    if first == last:
        raise WorkloadError(
            f"{workload.name}: all requests arrive at once: no rate can be scaled"
        )
    gaps = len(workload.requests) - 1
    scale = Fraction(gaps * _NS_PER_S, last - first) / Fraction(target)

    def moved(request: Request) -> Request:
        arrival = first + round((request.arrival_ns - first) * scale)
        cancel_at = request.cancel_at_ns
        if cancel_at is not None:
            cancel_at += arrival - request.arrival_ns
        return dataclasses.replace(request, arrival_ns=arrival, cancel_at_ns=cancel_at)

    return dataclasses.replace(
        workload, requests=tuple(moved(request) for request in workload.requests)
    )


def summary(workload: Workload) -> dict[str, object]:
    """Figures of a workload, ready for JSON.

    `reusable_share` is the share of prompt tokens that a cache without limits could
    serve: the longest common prefix with any earlier prompt and its answer, but never
    the last token of a prompt. No cache can do better; snapshots are fewer.
    """
    requests = workload.requests
    prompts = sum(r.num_prompt_tokens for r in requests)
    lengths = sorted(r.num_prompt_tokens for r in requests)
    span = requests[-1].arrival_ns - requests[0].arrival_ns
    reusable = sum(reusable_tokens(workload))
    return {
        "workload": workload.name,
        "form": workload.form,
        "num_requests": len(requests),
        "duration_s": span / _NS_PER_S,
        "requests_per_second": (len(requests) - 1) * _NS_PER_S / span if span else None,
        "num_prompt_tokens": prompts,
        "num_output_tokens": sum(r.max_new_tokens for r in requests),
        "prompt_tokens_p50": lengths[(len(lengths) - 1) // 2],
        "prompt_tokens_max": lengths[-1],
        "num_reusable_tokens": reusable,
        "reusable_share": reusable / prompts,
    }


def reusable_tokens(workload: Workload) -> list[int]:
    """Prompt tokens of each request that some earlier one had; see `summary`."""
    known = _Prefixes()
    found = []
    for request in workload.requests:
        matched = known.match(_places(workload, request.prompt))
        found.append(min(matched, request.num_prompt_tokens - 1))
        known.add(_places(workload, (*request.prompt, request.answer)))
    return found


def _places(workload: Workload, spans: Iterable[Span]) -> Iterator[Span]:
    """Spans, where token ids were given one a token: equal ids are equal tokens."""
    for span in spans:
        ids = workload.literals.get(span.stream)
        if ids is None:
            yield span
            continue
        for token in ids[span.start : span.start + span.length].tolist():
            yield Span(-1 - token, 0, 1)


class _Prefixes:
    """A tree of token sequences; an edge is a run of one stream."""

    def __init__(self):
        # (stream, start) of an edge's first token -> [its length, what follows].
        self._root: dict = {}

    def match(self, spans: Iterable[Span]) -> int:
        """Tokens of the longest known prefix."""
        node, matched = self._root, 0
        for stream, start, length in spans:
            while length:
                edge = node.get((stream, start))
                if edge is None:
                    return matched
                common = min(length, edge[0])
                matched += common
                if common < edge[0]:
                    # Inside of an edge only its own stream goes on.
                    node = {(stream, start + common): [edge[0] - common, edge[1]]}
                else:
                    node = edge[1]
                start, length = start + common, length - common
        return matched

    def add(self, spans: Iterable[Span]) -> None:
        """Makes a sequence known."""
        node = self._root
        for stream, start, length in spans:
            while length:
                edge = node.setdefault((stream, start), [length, {}])
                common = min(length, edge[0])
                if common < edge[0]:
                    rest = [edge[0] - common, edge[1]]
                    edge[:] = [common, {(stream, start + common): rest}]
                node = edge[1]
                start, length = start + common, length - common
