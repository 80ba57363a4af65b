"""`ReplayConfig`: every setting of a replay, checked before anything runs."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from decimal import Decimal

from jaxsched.cache.configuration import CAPACITY_POLICIES
from jaxsched.cache.eviction import Eviction
from jaxsched.core.build import MAX_DRAFT_TOKENS, bucket_size, budget, budget_limits
from jaxsched.core.config import MAX_COUNT, Rules, SchedulerConfig
from jaxsched.core.host import check_count, check_counts, check_flag
from jaxsched.core.plan import Budget
from jaxsched.scheduling.snapshots import SnapshotRules, snapshot_rules
from jaxsched.simulation.replay_clock import PS_PER_MS, PS_PER_NS, PS_PER_US

MAX_ROWS = 2**16
"""Most rows of the request table."""

EVICTIONS = tuple(str(name) for name in Eviction if name != Eviction.CLAIRVOYANT)
"""Policies that need not be told the future."""

_MAX_COST_PS = 2**32 - 1
_MAX_BASE_PS = 2**49
_MAX_SCALE = 10**6
_SMALLEST_OFFSETS = 4


class ReplayError(ValueError):
    """A replay that cannot run or go on; the text says why and what to change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Settings of a replay; the command line's options have the same names.

    A step takes `step_ms + token_us * tokens + context_ns * context`: tokens are those
    scheduled, drafts included; context is what the scheduled rows read, each of them
    its own tokens up to the end of its chunk. The defaults are of the order of an
    8-billion hybrid model in bf16 on one H200.

    Args:
      rules, chunking_policy, snapshot_mode, max_emit_points: see `SchedulerConfig`.
      block_size: tokens of a KV block.
      chunk_unit: tokens; default one block.
      max_num_seqs: requests that run at a time.
      max_num_batched_tokens: of a step; 0: no limit.
      max_context_length: of a chunk; 0: no limit.
      snapshot_interval, snapshot_from_start, snapshot_from_end, save_last,
        prefix_caching: where snapshots are due, see `snapshot_rules`.
      branch_snapshots: also where a prompt leaves one that is stored, and where a state
        was that would be hit had it not been evicted: a system prompt costs two
        requests, whatever its length.
      answer_snapshots: also at the end of every answer: the next turn starts there.
      decode_snapshots: also at the periodic points that an answer comes past: every
        decode stands on each position once.
      kv_blocks: of the pool; 0: unlimited.
      state_slots: snapshots kept at a time; 0: unlimited. The states of the requests
        that run come on top.
      pages_per_snapshot: 0: snapshots have slots of their own. Else blocks of the KV
        pool that each takes, so that eviction decides the split.
      state_tokens: bytes of a snapshot in KV tokens, for policies that weigh them; 0:
        pages_per_snapshot blocks, or one block.
      eviction: see `Eviction`; all but `clairvoyant`.
      capacity_policy: `guaranteed_no_evict` reserves prompt and answer at admission,
        `max_utilization` lets rows take blocks as they go and preempts the last one
        where there are none, `static_batch` admits only when nothing runs,
        `max_requests` looks at max_num_seqs alone.
      draft_tokens: proposed for every decode in every step.
      accepted_draft_tokens: of those that the budget kept, confirmed in every step.
      rate_scale: arrivals come this many times as fast.
      sequential: each request arrives when the one before it has ended.
      step_ms, token_us, context_ns: the cost line.

    Raises:
      ValueError: naming the field, the value and what would be right.
    """

    rules: str = "jaxsched"
    chunking_policy: str = "force_chunk"
    snapshot_mode: str = "cut"
    max_emit_points: int = 8
    block_size: int = 64
    chunk_unit: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_context_length: int = 0
    snapshot_interval: int = 512
    snapshot_from_start: Sequence[int] = ()
    snapshot_from_end: Sequence[int] = ()
    save_last: bool = False
    prefix_caching: bool = True
    branch_snapshots: bool = True
    answer_snapshots: bool = True
    decode_snapshots: bool = True
    kv_blocks: int = 0
    state_slots: int = 0
    pages_per_snapshot: int = 0
    state_tokens: int = 0
    eviction: str = "reuse_density"
    capacity_policy: str = "guaranteed_no_evict"
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    rate_scale: float = 1.0
    sequential: bool = False
    step_ms: float = 3.0
    token_us: float = 12.0
    context_ns: float = 2.0

    def __post_init__(self):
        for name in ("snapshot_from_start", "snapshot_from_end"):
            offsets = tuple(check_counts(name, getattr(self, name)))
            object.__setattr__(self, name, offsets)
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        self._check_cache()
        check_count("block_size", self.block_size, low=1)
        check_count("max_num_seqs", self.max_num_seqs, low=1, high=MAX_ROWS)
        check_count("snapshot_interval", self.snapshot_interval)
        check_count("draft_tokens", self.draft_tokens, high=MAX_DRAFT_TOKENS)
        check_count(
            "accepted_draft_tokens", self.accepted_draft_tokens, high=self.draft_tokens
        )
        self._check_number("rate_scale", 1 / _MAX_SCALE, _MAX_SCALE)
        budget_limits(**self._limits())
        scheduler = self.scheduler()
        most = self.max_num_batched_tokens
        if scheduler.rules == Rules.TENSORRT_LLM and 0 < most <= self.draft_tokens:
            raise ValueError(
                f"draft_tokens must be below max_num_batched_tokens={most} under the "
                "tensorrt_llm rules, which never trim a decode, "
                f"got {self.draft_tokens}"
            )
        for name, unit, high in _COSTS:
            self._check_number(name, 0, high / unit)
        if self.base_ps < 1:
            raise ValueError(f"step_ms must be above 0, got {self.step_ms!r}")

    def _check_cache(self) -> None:
        for name in ("kv_blocks", "state_slots", "pages_per_snapshot", "state_tokens"):
            check_count(name, getattr(self, name))
        for name, known in (
            ("eviction", EVICTIONS),
            ("capacity_policy", CAPACITY_POLICIES),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {value!r}"
                )
        pages = self.pages_per_snapshot
        if pages and not self.kv_blocks:
            raise ValueError(
                f"pages_per_snapshot={pages} shares the KV pool, so kv_blocks must say "
                "how large it is"
            )
        if pages > self.kv_blocks:
            raise ValueError(
                f"pages_per_snapshot must be at most kv_blocks={self.kv_blocks}, "
                f"got {pages}"
            )

    def _check_number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if not math.isfinite(value) or not low <= value <= high:
            raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value!r}")

    def _limits(self) -> dict:
        return {
            "max_num_batched_tokens": self.max_num_batched_tokens or None,
            "max_num_seqs": self.max_num_seqs,
            "chunk_unit_size": self.unit,
            "max_context_length": self.max_context_length or None,
            "strict": True,
        }

    @property
    def unit(self) -> int:
        """Tokens; chunks that a limit cuts end on its multiples."""
        return self.block_size if self.chunk_unit is None else self.chunk_unit

    @property
    def base_ps(self) -> int:
        """Picoseconds of any step."""
        return _whole(self.step_ms, PS_PER_MS)

    @property
    def token_ps(self) -> int:
        """Picoseconds of a scheduled token."""
        return _whole(self.token_us, PS_PER_US)

    @property
    def context_ps(self) -> int:
        """Picoseconds of a token of context."""
        return _whole(self.context_ns, PS_PER_NS)

    def scheduler(self) -> SchedulerConfig:
        """The static part, for the planner."""
        return SchedulerConfig(
            rules=self.rules,
            chunking_policy=self.chunking_policy,
            snapshot_mode=self.snapshot_mode,
            max_emit_points=self.max_emit_points,
            # The order of a batch is not looked at in a replay, so spare the sort.
            group_by_lora=self.rules == Rules.TENSORRT_LLM,
        )

    def budget(self) -> Budget:
        """The limits of every step."""
        return budget(**self._limits())

    def snapshot_rules(self) -> SnapshotRules:
        """Where snapshots are due; offsets padded, so that few counts compile."""
        return snapshot_rules(
            interval=self.snapshot_interval,
            from_start=_padded(self.snapshot_from_start, 0),
            from_end=_padded(self.snapshot_from_end, MAX_COUNT),
            save_last=self.save_last,
            block_size=self.block_size,
            enable_prefix_caching=self.prefix_caching,
        )


_FLAGS = (
    *("save_last", "prefix_caching", "sequential"),
    *("branch_snapshots", "answer_snapshots", "decode_snapshots"),
)
_COSTS = (
    ("step_ms", PS_PER_MS, _MAX_BASE_PS),
    ("token_us", PS_PER_US, _MAX_COST_PS),
    ("context_ns", PS_PER_NS, _MAX_COST_PS),
)


def _padded(offsets: tuple[int, ...], nowhere: int) -> tuple[int, ...]:
    """Offsets followed by some that lie outside of every prompt."""
    size = bucket_size(len(offsets), smallest=_SMALLEST_OFFSETS)
    return offsets + (nowhere,) * (size - len(offsets))


def _whole(value: float, unit: int) -> int:
    """A decimal number of units as whole picoseconds, rounded once."""
    return round(Decimal(repr(float(value))) * unit)
