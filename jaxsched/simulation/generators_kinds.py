"""Parameters of the generated workloads: what a person knows about their traffic.

Times are seconds, lengths tokens. `..._tokens` is the median of a length; single
lengths vary around it by `spread`. Counts are means unless they say otherwise.
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping

from jaxsched.core.config import MAX_COUNT
from jaxsched.simulation.workloads import WorkloadError

_MAX_REQUESTS = 10**6


def _number(default: float, help_text: str, low: float = 0, high: float = 1e6):
    return dataclasses.field(
        default=default, metadata={"help": help_text, "low": low, "high": high}
    )


def _tokens(default: int, help_text: str, low: int = 1):
    # A single length may be 20 times as large, and several are put together.
    return _number(default, help_text, low, MAX_COUNT // 1000)


def _count(default: int, help_text: str, low: int = 1, high: int = _MAX_REQUESTS):
    return _number(default, help_text, low, high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """What all kinds have.

    Raises:
      WorkloadError: naming the parameter, its value and what would be right.
    """

    requests: int = _count(500, "requests in all")
    requests_per_second: float = _number(2.0, "once sessions have built up", 1e-6)
    burstiness: float = _number(
        1.0, "of arrivals: variance of gaps over their squared mean; 1: Poisson", 0, 100
    )
    spread: float = _number(0.5, "of lengths: sigma of a log-normal; 0: none", 0, 2)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low, high = field.metadata["low"], field.metadata["high"]
            whole = field.type is int
            kind = int if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind):
                wanted = "a whole number" if whole else "a number"
                raise WorkloadError(f"{field.name} must be {wanted}, got {value!r}")
            if not math.isfinite(value) or not low <= value <= high:
                raise WorkloadError(
                    f"{field.name} must be in [{low:g}, {high:g}], got {value!r}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat(Traffic):
    """Chats of several turns; each turn repeats all that was said before."""

    turns: float = _number(5.0, "of a chat", 1, 1000)
    assistants: int = _count(1, "with a system prompt each", high=10_000)
    system_prompt_tokens: int = _tokens(1000, "of an assistant, always the same", 0)
    user_tokens: int = _tokens(150, "of a user's turn")
    answer_tokens: int = _tokens(250, "of an answer")
    think_time_s: float = _number(15.0, "between an answer and the next turn")
    token_time_s: float = _number(0.02, "of an answer's token, before the user reads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agents(Traffic):
    """Agents with tools: a task, then call after call on a context that grows."""

    calls: float = _number(8.0, "model calls of a task", 1, 1000)
    tool_sets: int = _count(2, "with a system prompt each", high=10_000)
    system_prompt_tokens: int = _tokens(4000, "with the tools' descriptions", 0)
    task_tokens: int = _tokens(600, "of a task")
    tool_result_tokens: int = _tokens(1200, "of a tool's result")
    answer_tokens: int = _tokens(120, "of a call")
    tool_time_s: float = _number(2.0, "that a tool takes")
    token_time_s: float = _number(0.02, "of an answer's token, before the tool runs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedPrompts(Traffic):
    """Single requests behind a few system prompts, some much more popular."""

    system_prompts: int = _count(20, "different ones", high=100_000)
    popularity: float = _number(1.0, "exponent of Zipf's law; 0: all alike", 0, 10)
    system_prompt_tokens: int = _tokens(1600, "of a system prompt")
    user_tokens: int = _tokens(600, "behind it")
    answer_tokens: int = _tokens(200, "of an answer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bursts(Traffic):
    """Bursts of requests over one text, with quiet times between them."""

    burst_requests: float = _number(20.0, "of a burst", 1, 100_000)
    burst_s: float = _number(1.0, "in which the requests of a burst come")
    shared_tokens: int = _tokens(2000, "that the requests of a burst have in common", 0)
    user_tokens: int = _tokens(400, "of a request's own")
    answer_tokens: int = _tokens(150, "of an answer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents(Traffic):
    """Long documents, each asked several questions; questions do not see each other."""

    questions: float = _number(4.0, "of a document", 1, 10_000)
    system_prompt_tokens: int = _tokens(500, "before every document", 0)
    document_tokens: int = _tokens(30_000, "of a document")
    question_tokens: int = _tokens(60, "of a question")
    answer_tokens: int = _tokens(300, "of an answer")
    reading_time_s: float = _number(30.0, "between two questions")


KINDS: Mapping[str, type[Traffic]] = {
    "chat": Chat,
    "agents": Agents,
    "shared-prompts": SharedPrompts,
    "bursts": Bursts,
    "documents": Documents,
}
"""Kinds by the name that the command line uses."""


def make_traffic(kind: str, parameters: Mapping[str, object]) -> Traffic:
    """The parameters of a kind; those that are not given have their defaults.

    Args:
      kind: a name of `KINDS`.
      parameters: numbers, or texts of numbers.

    Raises:
      WorkloadError: on an unknown kind or parameter, or a value that is not right.
    """
    if kind not in KINDS:
        raise WorkloadError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    fields = {field.name: field for field in dataclasses.fields(KINDS[kind])}
    given = {}
    for name, value in parameters.items():
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {close[0]}?" if close else "known: "
            hint += "" if close else ", ".join(fields)
            raise WorkloadError(f"{kind} has no parameter {name!r}: {hint}")
        given[name] = _read(name, value, fields[name].type)
    return KINDS[kind](**given)


def _read(name: str, value: object, kind: type) -> object:
    if not isinstance(value, str):
        return value
    try:
        return kind(value)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise WorkloadError(f"{name} must be {wanted}, got {value!r}") from None
