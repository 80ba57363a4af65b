"""Workloads: what arrives when, how long it is, and which tokens it shares with whom.

A prompt is kept as a few *spans* of named token streams, not as tokens: a trace of
12,000 requests with 150 million prompt tokens stays small. Two positions hold the same
token exactly if they lie at the same place of the same stream, so prefix identity is
exact, and token ids are made from it only where somebody asks for them.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxsched.core.config import MAX_COUNT, NO_ID

_MAX_TOKEN_ID = 2**31 - 1


class WorkloadError(ValueError):
    """A workload that cannot be used; the text names file, line, field and value."""


class Span(NamedTuple):
    """A run of tokens: `length` of them from position `start` of a stream."""

    stream: int
    start: int
    length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a workload."""

    request_id: str | int
    where: str  # the place it was read from, for messages
    arrival_ns: int  # on the workload's own clock
    num_prompt_tokens: int
    max_new_tokens: int
    prompt: tuple[Span, ...]
    answer: Span  # the stream of its output tokens
    snapshot_points: tuple[int, ...] = ()
    priority: int = 0
    lora_id: int = NO_ID
    cancel_at_ns: int | None = None  # on the same clock as the arrival


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests by arrival (ties: as read), and the streams that their spans point to.

    Attributes:
      name: file name, or what it was generated from.
      form: which of the known forms it was read as.
      requests: in first-come order.
      stream_lengths: tokens of every stream that some request refers to.
      literals: streams whose token ids were given, i32 arrays by stream.
      num_dropped: rows left out because they hold no tokens.
    """

    name: str
    form: str
    requests: tuple[Request, ...]
    stream_lengths: tuple[int, ...]
    literals: Mapping[int, np.ndarray]
    num_dropped: int = 0

    @functools.cached_property
    def first_ids(self) -> np.ndarray:
        """The token id at position 0 of every stream, i64[streams].

        Streams get disjoint ranges of ids, above every id that was given literally.
        """
        lengths = np.asarray(self.stream_lengths, np.int64)
        for stream in self.literals:
            lengths[stream] = 0
        highest = max((int(ids.max()) for ids in self.literals.values()), default=-1)
        ends = highest + 1 + np.cumsum(lengths)
        if len(ends) and int(ends[-1]) - 1 > _MAX_TOKEN_ID:
            raise WorkloadError(
                f"{self.name}: {int(ends[-1])} distinct tokens do not fit into int32 "
                "token ids: read fewer requests"
            )
        return ends - lengths

    def token_ids(
        self, spans: Sequence[Span], start: int = 0, stop: int | None = None
    ) -> np.ndarray:
        """Token ids at positions [start, stop) of some spans in a row, i32.

        The ids of different streams never meet, and the same place of a stream has
        the same id in every request.
        """
        parts, at = [], 0
        for span in spans:
            low = max(start - at, 0)
            end = span.length if stop is None else min(span.length, stop - at)
            at += span.length
            if end <= low:
                continue
            low, end = span.start + low, span.start + end
            if span.stream in self.literals:
                parts.append(self.literals[span.stream][low:end])
            else:
                first = int(self.first_ids[span.stream])
                parts.append(np.arange(first + low, first + end, dtype=np.int32))
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def prompt_token_ids(self, index: int, start: int = 0, stop: int | None = None):
        """Token ids of a request's prompt, i32; see `token_ids`."""
        return self.token_ids(self.requests[index].prompt, start, stop)

    def answer_token_ids(self, index: int) -> np.ndarray:
        """Token ids of a request's answer, i32; see `token_ids`."""
        return self.token_ids((self.requests[index].answer,))


class WorkloadBuilder:
    """Collects requests and streams while a workload is read or generated."""

    def __init__(self, name: str):
        self._name = name
        self._streams: dict[Hashable, int] = {}
        self._lengths: list[int] = []
        self._literals: dict[int, np.ndarray] = {}
        self._requests: list[Request] = []
        self._by_id: dict[str, Request] = {}
        self._repeats: list[tuple[str, str, str, int]] = []
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def span(self, key: Hashable, length: int, start: int = 0) -> Span:
        """A span of the stream that is called `key`."""
        stream = self._streams.setdefault(key, len(self._lengths))
        if stream == len(self._lengths):
            self._lengths.append(0)
        self._lengths[stream] = max(self._lengths[stream], start + length)
        return Span(stream, start, length)

    def literal(self, key: Hashable, token_ids: Sequence[int]) -> Span:
        """A span of tokens whose ids are given."""
        span = self.span(key, len(token_ids))
        self._literals[span.stream] = np.asarray(token_ids, np.int32)
        return span

    def repeat_answer(self, where: str, field: str, of: str, length: int) -> Span:
        """A span of another request's answer; `build` checks that there is one."""
        self._repeats.append((where, field, of, length))
        return self.span(("answer", of), length)

    def add(
        self,
        *,
        request_id: str | int,
        where: str,
        prompt: Sequence[Span],
        max_new_tokens: int,
        **fields,
    ) -> Request:
        """Adds a request; the other fields are those of `Request`.

        Raises:
          WorkloadError: if the id is taken or the lengths pass MAX_COUNT.
        """
        key = str(request_id)
        if key in self._by_id:
            raise WorkloadError(
                f"{where}: id {request_id!r} is taken by {self._by_id[key].where}"
            )
        length = sum(span.length for span in prompt)
        if length < 1:
            raise WorkloadError(f"{where}: the prompt must have a token, got none")
        if length + max_new_tokens > MAX_COUNT:
            raise WorkloadError(
                f"{where}: prompt and answer together must have at most {MAX_COUNT} "
                f"tokens, got {length} and {max_new_tokens}"
            )
        request = Request(
            request_id=request_id,
            where=where,
            num_prompt_tokens=length,
            max_new_tokens=max_new_tokens,
            prompt=tuple(span for span in prompt if span.length),
            answer=self.span(("answer", key), max_new_tokens),
            **fields,
        )
        self._by_id[key] = request
        self._requests.append(request)
        return request

    def build(self, form: str) -> Workload:
        """The workload, requests sorted by arrival.

        Raises:
          WorkloadError: if there is no request, or a prompt repeats an answer that
            does not exist or is shorter.
        """
        if not self._requests:
            raise WorkloadError(f"{self._name}: no requests")
        for where, field, of, length in self._repeats:
            parent = self._by_id.get(of)
            if parent is None:
                raise WorkloadError(f"{where}: {field} names an unknown request {of!r}")
            if parent.where == where:
                raise WorkloadError(f"{where}: {field} repeats its own answer")
            if length > parent.max_new_tokens:
                raise WorkloadError(
                    f"{where}: {field} repeats {length} tokens of an answer that has "
                    f"{parent.max_new_tokens} (output_length of {parent.where})"
                )
        return Workload(
            name=self._name,
            form=form,
            requests=tuple(sorted(self._requests, key=lambda r: r.arrival_ns)),
            stream_lengths=tuple(self._lengths),
            literals=dict(self._literals),
            num_dropped=self.num_dropped,
        )


def first_tokens(spans: Sequence[Span], length: int) -> list[Span]:
    """The spans that cover the first `length` tokens of `spans`."""
    found = []
    for span in spans:
        if length <= 0:
            break
        found.append(span._replace(length=min(span.length, length)))
        length -= span.length
    return found
