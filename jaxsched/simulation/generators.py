"""Seeded workloads with exact prefix identity, from parameters of `generators_kinds`.

The same kind, parameters and seed give the same workload on every machine. Segments
and answers carry the names that the `segments` form uses, so a workload that is
written to a file and read again is the same one.
"""

import heapq
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxsched.simulation.generators_kinds import (
    KINDS,
    Agents,
    Bursts,
    Chat,
    Documents,
    SharedPrompts,
    Traffic,
    make_traffic,
)
from jaxsched.simulation.workloads import Workload, WorkloadBuilder

_NS_PER_S = 10**9
_MOST = 20  # times the median: the longest length


class _Turn(NamedTuple):
    """A request to be: segments are (name, tokens), `answer:ID` repeats an answer."""

    at_s: float
    name: str
    segments: tuple[tuple[str, int], ...]
    output: int


def generate(kind: str, seed: int = 0, **parameters) -> Workload:
    """A workload of a kind.

    Args:
      kind: a name of `KINDS`.
      seed: any integer.
      parameters: fields of that kind's class.

    Raises:
      WorkloadError: on an unknown kind or parameter, or a value that is not right.
    """
    traffic = make_traffic(kind, parameters)
    name = next(name for name, made in KINDS.items() if made is type(traffic))
    draw = random.Random(f"{name}:{seed}")
    turns = _first(_SESSIONS[type(traffic)](traffic, draw), traffic.requests)
    builder = WorkloadBuilder(f"generated {name}, seed {seed}")
    for turn in turns:
        builder.add(
            request_id=turn.name,
            where=f"generated {turn.name}",
            arrival_ns=round(turn.at_s * _NS_PER_S),
            prompt=[
                builder.span(_key(segment), length) for segment, length in turn.segments
            ],
            max_new_tokens=turn.output,
        )
    return builder.build("generated")


def _key(segment: str) -> tuple[str, str]:
    """The stream of a segment, called as the reader of files calls it."""
    if segment.startswith("answer:"):
        return "answer", segment.removeprefix("answer:")
    return "segment", segment


def _first(sessions: Iterator[list[_Turn]], size: int) -> list[_Turn]:
    """The first turns in time of sessions that begin one after the other."""
    waiting: list[tuple[float, int, _Turn]] = []
    found: list[_Turn] = []
    number = 0
    for session in sessions:
        # Nothing of this or a later session can come before its first turn.
        while waiting and waiting[0][0] <= session[0].at_s:
            found.append(heapq.heappop(waiting)[2])
            if len(found) == size:
                return found
        for turn in session:
            heapq.heappush(waiting, (turn.at_s, number, turn))
            number += 1
    raise AssertionError("sessions never end")


def _starts(traffic: Traffic, draw: random.Random, per_session: float):
    """Times at which sessions begin, without end."""
    gap, at = per_session / traffic.requests_per_second, 0.0
    while True:
        yield at
        at += _gap(draw, gap, traffic.burstiness)


def _gap(draw: random.Random, mean: float, burstiness: float) -> float:
    """A gamma-distributed gap; `burstiness` is its squared coefficient of variation."""
    if burstiness == 0:
        return mean
    return draw.gammavariate(1 / burstiness, mean * burstiness)


def _length(draw: random.Random, median: int, spread: float) -> int:
    drawn = round(median * draw.lognormvariate(0, spread)) if spread else median
    return max(1, min(drawn, _MOST * median))


def _number_of(draw: random.Random, mean: float) -> int:
    """A geometric number >= 1 with some mean."""
    if mean <= 1:
        return 1
    number = 1
    while draw.random() < 1 - 1 / mean:
        number += 1
    return number


def _growing(
    draw: random.Random,
    name: str,
    at_s: float,
    start: list[tuple[str, int]],
    steps: list[tuple[str, int]],
    pauses: tuple[float, float],
    answer_tokens: int,
    spread: float,
) -> list[_Turn]:
    """Turns that each repeat all before them, answers included.

    Args:
      start: segments in front of the first turn.
      steps: the segment that each turn adds.
      pauses: seconds of a pause, and of an answer's token.
    """
    said, turns = list(start), []
    for number, step in enumerate(steps):
        said.append(step)
        output = _length(draw, answer_tokens, spread)
        turns.append(_Turn(at_s, f"{name}.{number}", tuple(said), output))
        said.append((f"answer:{name}.{number}", output))
        at_s += output * pauses[1]
        at_s += draw.expovariate(1 / pauses[0]) if pauses[0] else 0.0
    return turns


def _chat(traffic: Chat, draw: random.Random) -> Iterator[list[_Turn]]:
    pauses = (traffic.think_time_s, traffic.token_time_s)
    for number, at_s in enumerate(_starts(traffic, draw, traffic.turns)):
        assistant = draw.randrange(traffic.assistants)
        name = f"chat{number}"
        steps = [
            (f"{name}.user{turn}", _length(draw, traffic.user_tokens, traffic.spread))
            for turn in range(_number_of(draw, traffic.turns))
        ]
        start = _prompt(f"assistant{assistant}", traffic.system_prompt_tokens)
        yield _growing(
            draw,
            name,
            at_s,
            start,
            steps,
            pauses,
            traffic.answer_tokens,
            traffic.spread,
        )


def _agents(traffic: Agents, draw: random.Random) -> Iterator[list[_Turn]]:
    pauses = (traffic.tool_time_s, traffic.token_time_s)
    for number, at_s in enumerate(_starts(traffic, draw, traffic.calls)):
        tools, name = draw.randrange(traffic.tool_sets), f"task{number}"
        steps = [(f"{name}.text", _length(draw, traffic.task_tokens, traffic.spread))]
        for call in range(1, _number_of(draw, traffic.calls)):
            result = _length(draw, traffic.tool_result_tokens, traffic.spread)
            steps.append((f"{name}.result{call}", result))
        start = _prompt(f"tools{tools}", traffic.system_prompt_tokens)
        yield _growing(
            draw,
            name,
            at_s,
            start,
            steps,
            pauses,
            traffic.answer_tokens,
            traffic.spread,
        )


def _shared(traffic: SharedPrompts, draw: random.Random) -> Iterator[list[_Turn]]:
    ranks = range(traffic.system_prompts)
    weights = [(rank + 1) ** -traffic.popularity for rank in ranks]
    sizes = [_length(draw, traffic.system_prompt_tokens, traffic.spread) for _ in ranks]
    for number, at_s in enumerate(_starts(traffic, draw, 1)):
        rank = draw.choices(ranks, weights)[0]
        own = _length(draw, traffic.user_tokens, traffic.spread)
        segments = ((f"system{rank}", sizes[rank]), (f"user{number}", own))
        output = _length(draw, traffic.answer_tokens, traffic.spread)
        yield [_Turn(at_s, f"r{number}", segments, output)]


def _bursts(traffic: Bursts, draw: random.Random) -> Iterator[list[_Turn]]:
    for number, at_s in enumerate(_starts(traffic, draw, traffic.burst_requests)):
        shared = _prompt(f"burst{number}.shared", traffic.shared_tokens)
        size = _number_of(draw, traffic.burst_requests)
        offsets = sorted(draw.uniform(0, traffic.burst_s) for _ in range(size - 1))
        turns = []
        for at, offset in enumerate([0.0, *offsets]):
            name = f"burst{number}.{at}"
            own = _length(draw, traffic.user_tokens, traffic.spread)
            segments = (*shared, (f"{name}.own", own))
            output = _length(draw, traffic.answer_tokens, traffic.spread)
            turns.append(_Turn(at_s + offset, name, segments, output))
        yield turns


def _documents(traffic: Documents, draw: random.Random) -> Iterator[list[_Turn]]:
    for number, at_s in enumerate(_starts(traffic, draw, traffic.questions)):
        size = _length(draw, traffic.document_tokens, traffic.spread)
        front = _prompt("system", traffic.system_prompt_tokens)
        front.append((f"document{number}", size))
        turns = []
        for question in range(_number_of(draw, traffic.questions)):
            name = f"document{number}.{question}"
            own = _length(draw, traffic.question_tokens, traffic.spread)
            segments = (*front, (f"{name}.question", own))
            output = _length(draw, traffic.answer_tokens, traffic.spread)
            turns.append(_Turn(at_s, name, segments, output))
            pause = traffic.reading_time_s
            at_s += draw.expovariate(1 / pause) if pause else 0.0
        yield turns


def _prompt(name: str, tokens: int) -> list[tuple[str, int]]:
    return [(name, tokens)] if tokens else []


_SESSIONS: dict[type[Traffic], Callable] = {
    Chat: _chat,
    Agents: _agents,
    SharedPrompts: _shared,
    Bursts: _bursts,
    Documents: _documents,
}
