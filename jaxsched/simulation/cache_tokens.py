"""Token ids of requests, made inside the loop from a few spans of each.

A trace of 150 million prompt tokens is kept as spans; a request's ids are written out
once, when it is admitted.

Shape letters: N requests (padded), S spans of all of them, P tokens given by value.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.core.build import bucket_size
from jaxsched.core.masking import iota
from jaxsched.simulation.workloads import Workload

Array = jax.Array

_SMALLEST_SPANS = 256
_SMALLEST_ROW = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenSpans:
    """Prompt and answer of every request as runs of consecutive token ids."""

    first_span: Array  # i32[N]  where a request's spans begin
    num_spans: Array  # i32[N]
    start: Array  # i32[S]  position in its request at which a span begins
    base: Array  # i32[S]  token id, or place among the given ones, minus the position
    is_given: Array  # bool[S]  its ids are read from `given`
    given: Array  # i32[P]  P = 0: no request has such tokens
    most: int = dataclasses.field(metadata={"static": True})  # spans of one request


def token_spans(workload: Workload, entering: np.ndarray, size: int) -> TokenSpans:
    """The spans of the requests that enter, padded to `size` requests."""
    place, given = {}, []
    count = 0
    for stream, ids in workload.literals.items():
        place[stream] = count
        given.append(np.asarray(ids, np.int32))
        count += len(ids)
    first_ids = workload.first_ids if len(entering) else ()
    starts, bases, flags, counts = [], [], [], []
    for index in entering:
        request = workload.requests[index]
        at = 0
        spans = [span for span in (*request.prompt, request.answer) if span.length]
        for span in spans:
            is_given = span.stream in place
            first = place[span.stream] if is_given else int(first_ids[span.stream])
            starts.append(at)
            bases.append(first + span.start - at)
            flags.append(is_given)
            at += span.length
        counts.append(len(spans))
    total = bucket_size(len(starts) + 1, smallest=_SMALLEST_SPANS)
    padding = [0] * (size - len(counts))
    return TokenSpans(
        first_span=jnp.asarray(
            np.array([0, *np.cumsum(counts)][: len(counts)] + padding, np.int32)
        ),
        num_spans=jnp.asarray(np.array(counts + padding, np.int32)),
        start=_padded(starts, total),
        base=_padded(bases, total),
        is_given=_padded(flags, total).astype(bool),
        given=_padded(
            np.concatenate(given) if given else [], bucket_size(count) if count else 0
        ),
        most=bucket_size(max(counts, default=1), smallest=_SMALLEST_ROW),
    )


def _padded(values, size: int) -> Array:
    column = np.zeros(size, np.int32)
    column[: len(values)] = values
    return jnp.asarray(column)


def tokens_of(spans: TokenSpans, request: Array, length: int) -> Array:
    """The first token ids of a request, i32[length]; what lies behind it is any id.

    Args:
      spans: of all requests.
      request: i32[].
      length: static.
    """
    nth = iota(spans.most)
    own = nth < spans.num_spans[request]
    which = spans.first_span[request] + nth
    start = spans.start.at[which].get(mode="clip")
    base = spans.base.at[which].get(mode="clip")
    position = iota(length)
    # A step at every start, summed up: which span a position lies in.
    begins = jnp.where(own, start, length)
    inside = jnp.cumsum(jnp.zeros(length, jnp.int32).at[begins].add(1, mode="drop"))
    inside = jnp.maximum(inside - 1, 0)
    ids = base[inside] + position
    if not spans.given.shape[0]:
        return ids
    is_given = spans.is_given.at[which].get(mode="clip")[inside]
    return jnp.where(is_given, spans.given.at[ids].get(mode="clip"), ids)
