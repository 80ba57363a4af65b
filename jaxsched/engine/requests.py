"""Requests as the host sees them: what was asked, what came of it, checks of input."""

import dataclasses
import math
import numbers
from collections.abc import Sequence

import numpy as np

from jaxsched.core.config import MAX_COUNT, NO_ID
from jaxsched.core.host import check_count, check_counts, check_flag
from jaxsched.engine.admission import Candidate
from jaxsched.engine.config import EngineConfig

_MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are drawn.

    Args:
      temperature: 0: the likeliest token each time; else logits are divided by it.
      top_k: draw from so many of the likeliest; 0: from all.
      top_p: draw from the likeliest tokens that make up this share, in (0, 1].
      seed: with a token's position, all the chance there is: the same seed gives the
        same tokens, whatever else is served.

    Raises:
      ValueError: naming the field and the value.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            real = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not real or not math.isfinite(value):
                raise ValueError(f"{name} must be a number, got {value!r}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}")
        check_count("top_k", self.top_k)
        check_count("seed", self.seed, high=_MAX_SEED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What a step gave a request.

    `finish_reason` is None while it goes on, then `length`, `stop` or `cancelled`; a
    stop token is the last one of the answer.
    """

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclasses.dataclass(kw_only=True)
class RequestRecord:
    """A request from its submission on; what was matched is of its first admission."""

    request_id: int
    prompt: np.ndarray  # i32[num_prompt_tokens]
    max_new_tokens: int
    sampling: SamplingParams
    stop_tokens: tuple[int, ...]
    snapshot_points: tuple[int, ...]
    priority: int
    use_cache: bool
    output: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    num_admissions: int = 0
    num_cached_tokens: int = 0
    num_kv_matched_tokens: int = 0
    num_state_matched_tokens: int = 0
    miss_reason: int = 0
    num_prefilled_tokens: int = 0  # of its prompt, in all its admissions
    num_decoded_tokens: int = 0  # computed by decoding, in all its admissions
    num_restored_tokens: int = 0  # taken from the cache, in all its admissions
    chunks: list[int] = dataclasses.field(default_factory=list)  # ends
    snapshots: set[int] = dataclasses.field(default_factory=set)  # positions filed
    # Tokens since its admission: behind those that it has, they are new.
    num_sampled: int = 0

    @property
    def num_preemptions(self) -> int:
        """How often it lost its row."""
        return max(self.num_admissions - 1, 0)


def check_request(
    config: EngineConfig,
    vocab_size: int,
    token_ids: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingParams,
    stop_tokens: Sequence[int],
    snapshot_points: Sequence[int],
    priority: int,
    use_cache: bool,
    request_id: int,
) -> RequestRecord:
    """A record of a request that can be served.

    Raises:
      ValueError: naming the field, the value and what would be right.
    """
    ids = check_counts("prompt tokens", token_ids)
    if not ids:
        raise ValueError("prompt tokens must not be empty")
    for field, values in (("prompt tokens", ids), ("stop tokens", stop_tokens)):
        values = check_counts(field, values)
        outside = [at for at, token in enumerate(values) if token >= vocab_size]
        if outside:
            at = outside[0]
            raise ValueError(
                f"{field}[{at}] must be below the vocabulary's {vocab_size}, "
                f"got {values[at]}"
            )
    check_count("max_new_tokens", max_new_tokens, low=1)
    check_count("priority", priority, low=-MAX_COUNT)
    points = sorted(set(check_counts("snapshot points", snapshot_points, low=1)))
    for field, values, most in (
        ("stop tokens", stop_tokens, config.max_stop_tokens),
        ("snapshot points", points, config.max_points),
    ):
        if len(values) > most:
            raise ValueError(
                f"{field} must be at most {most}, got {len(values)}: raise "
                f"max_{field.replace('snapshot ', '').replace(' ', '_')}"
            )
    whole = len(ids) + max_new_tokens
    for name, room in (
        ("max_model_len", config.blocks_per_row * config.block_size),
        ("num_blocks", config.num_blocks * config.block_size),
    ):
        if whole > room:
            raise ValueError(
                f"prompt and answer together have {whole} tokens, {name} allows {room}"
            )
    return RequestRecord(
        request_id=request_id,
        prompt=np.asarray(ids, np.int32),
        max_new_tokens=int(max_new_tokens),
        sampling=sampling,
        stop_tokens=tuple(stop_tokens),
        snapshot_points=tuple(points),
        priority=priority,
        use_cache=check_flag("use_cache", use_cache),
    )


def candidate_of(config: EngineConfig, record: RequestRecord) -> Candidate:
    """A request as `admit` takes it; NumPy arrays, which one call hands over."""
    known = np.concatenate([record.prompt, np.asarray(record.output, np.int32)])
    drawing = record.sampling
    return Candidate(
        tokens=_padded(known, config.blocks_per_row * config.block_size, 0),
        num_prompt_tokens=np.int32(len(record.prompt)),
        num_known=np.int32(len(known)),
        max_new_tokens=np.int32(record.max_new_tokens),
        priority=np.int32(record.priority),
        number=np.int32(record.request_id),
        points=_padded(record.snapshot_points, config.max_points, NO_ID),
        stop_tokens=_padded(record.stop_tokens, config.max_stop_tokens, NO_ID),
        temperature=np.float32(drawing.temperature),
        top_k=np.int32(drawing.top_k),
        top_p=np.float32(drawing.top_p),
        seed=np.uint32(drawing.seed),
        reads=np.bool_(record.use_cache),
    )


def _padded(values: Sequence[int], size: int, fill: int) -> np.ndarray:
    column = np.full(size, fill, np.int32)
    column[: len(values)] = values
    return column
