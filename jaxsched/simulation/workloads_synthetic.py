"""The default workload: seeded multi-turn chats with a few assistants.

Every chat opens with the system prompt of its assistant, some bring a document, and
each turn repeats everything said before, answers included. So prompts share prefixes
in the three ways that matter: at a system prompt, at a whole chat, and not at all.
"""

import random

from jaxsched.simulation.workloads import Workload, WorkloadBuilder

_SYSTEM_TOKENS = (1600, 700, 2400)
_CHATS_PER_SECOND = 8.0
_MS_PER_ANSWER_TOKEN = 12
_MEAN_PAUSE_MS = 4_000
_NS_PER_MS = 10**6


def synthetic_workload(
    seed: int = 0, num_chats: int = 70, limit: int | None = None
) -> Workload:
    """Generates chats; the same arguments give the same workload on every machine.

    Args:
      seed: any integer.
      num_chats: chats that begin.
      limit: requests kept, in order of arrival.
    """
    draw = random.Random(seed)
    turns, start_ms = [], 0.0
    for chat in range(num_chats):
        start_ms += draw.expovariate(_CHATS_PER_SECOND) * 1000
        turns += _chat(draw, chat, start_ms)
    turns.sort(key=lambda turn: turn["ms"])
    builder = WorkloadBuilder(f"synthetic chats, seed {seed}")
    for turn in turns[:limit]:
        name = turn["id"]
        builder.add(
            request_id=name,
            where=f"synthetic {name}",
            arrival_ns=round(turn["ms"] * _NS_PER_MS),
            prompt=[builder.span(key, length) for key, length in turn["prompt"]],
            max_new_tokens=turn["output"],
        )
    return builder.build("synthetic")


def _chat(draw: random.Random, chat: int, start_ms: float) -> list[dict]:
    """The turns of one chat; each prompt repeats the one before and its answer."""
    assistant = draw.randrange(len(_SYSTEM_TOKENS))
    said = [(("system", assistant), _SYSTEM_TOKENS[assistant])]
    if draw.random() < 0.3:
        said.append((("document", chat), _length(draw, 5000, 0.5)))
    turns, at = [], start_ms
    for turn in range(1 + min(int(draw.expovariate(0.5)), 7)):
        name = f"chat{chat}.{turn}"
        said.append((("user", name), _length(draw, 180, 0.8)))
        output = _length(draw, 160, 0.7)
        turns.append({"id": name, "ms": at, "prompt": tuple(said), "output": output})
        said.append((("answer", name), output))
        at += output * _MS_PER_ANSWER_TOKEN
        at += draw.expovariate(1 / _MEAN_PAUSE_MS)
    return turns


def _length(draw: random.Random, median: int, spread: float) -> int:
    return max(1, min(round(median * draw.lognormvariate(0, spread)), 30 * median))
