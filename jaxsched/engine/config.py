"""`EngineConfig`: sizes and choices of an engine, checked before anything is built."""

import dataclasses
from collections.abc import Sequence

import jax

from jaxsched.cache.eviction import Eviction
from jaxsched.cache.hybrid_types import HybridConfig
from jaxsched.cache.selection import Selection
from jaxsched.core.build import budget, budget_limits
from jaxsched.core.config import SchedulerConfig, SnapshotMode
from jaxsched.core.host import check_count, check_counts, check_flag
from jaxsched.core.plan import Budget
from jaxsched.scheduling.snapshots import SnapshotRules, snapshot_rules

CAPACITY_POLICIES = ("max_utilization", "guaranteed_no_evict")
_LEARNED = 2  # branch and ghost point of a row
_SELECTION = {"cpu": Selection.HALVING}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything static about an engine; hashable.

    The defaults are small: they serve a few requests on a CPU.

    Args:
      max_num_seqs: requests that run at a time.
      max_num_batched_tokens: tokens of a step.
      max_model_len: tokens of a request, prompt and answer, rounded up to blocks.
      block_size: tokens of a KV block.
      num_blocks: KV blocks; 0: what all rows need at their longest.
      num_snapshots: slots for snapshots.
      decode_steps: most decode steps of one call, while nothing but decoding is due.
      chunking_policy, snapshot_mode, max_emit_points: see `SchedulerConfig`.
      snapshot_interval, snapshot_from_start, snapshot_from_end, save_last: where
        snapshots are due, see `snapshot_rules`.
      prefix_caching: off: nothing is reused and nothing kept.
      branch_snapshots: also where a prompt leaves a stored one, and where a state was
        evicted that would have been hit.
      answer_snapshots: also keep answers, and a state at their end. A state left by
        decoding continues within rounding, so tokens may then differ from those
        without reuse; without it they are the same, bit for bit.
      eviction: see `Eviction`.
      capacity_policy: `max_utilization` lets rows take blocks as they go and preempts
        the youngest where there are none, `guaranteed_no_evict` reserves prompt and
        answer at admission.
      max_points: snapshot points that a request can ask for.
      max_stop_tokens: stop tokens that a request can name.

    Raises:
      ValueError: naming the field, the value and what would be right.
    """

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    max_model_len: int = 2048
    block_size: int = 32
    num_blocks: int = 0
    num_snapshots: int = 64
    decode_steps: int = 1
    chunking_policy: str = "first_come_first_served"
    snapshot_mode: str = "cut"
    max_emit_points: int = 8
    snapshot_interval: int = 256
    snapshot_from_start: Sequence[int] = ()
    snapshot_from_end: Sequence[int] = ()
    save_last: bool = True
    prefix_caching: bool = True
    branch_snapshots: bool = True
    answer_snapshots: bool = False
    eviction: str = "reuse_density"
    capacity_policy: str = "max_utilization"
    max_points: int = 4
    max_stop_tokens: int = 4

    def __post_init__(self):
        for name, low in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 2),
            ("block_size", 1),
            ("num_blocks", 0),
            ("num_snapshots", 0),
            ("decode_steps", 1),
            ("snapshot_interval", 0),
            ("max_points", 0),
            ("max_stop_tokens", 1),
        ):
            check_count(name, getattr(self, name), low=low)
        for name in ("snapshot_from_start", "snapshot_from_end"):
            offsets = tuple(check_counts(name, getattr(self, name)))
            object.__setattr__(self, name, offsets)
        for name in (
            *("save_last", "prefix_caching", "branch_snapshots", "answer_snapshots"),
        ):
            check_flag(name, getattr(self, name))
        if self.capacity_policy not in CAPACITY_POLICIES:
            raise ValueError(
                f"capacity_policy must be one of {', '.join(CAPACITY_POLICIES)}, "
                f"got {self.capacity_policy!r}"
            )
        if self.chunking_policy == "none":
            raise ValueError(
                "chunking_policy must cut prompts (force_chunk, equal_progress, "
                "first_come_first_served), got 'none': an engine keeps its states by "
                "cutting"
            )
        if self.eviction == Eviction.CLAIRVOYANT:
            raise ValueError("eviction='clairvoyant' needs the future: take another")
        if self.num_blocks == 0:
            object.__setattr__(
                self, "num_blocks", self.max_num_seqs * self.blocks_per_row
            )
        budget_limits(**self._limits())
        self.scheduler()
        self.hybrid()

    @property
    def blocks_per_row(self) -> int:
        """Width of a block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def grows(self) -> bool:
        """Whether rows take blocks as they go, and may be preempted."""
        return self.capacity_policy == "max_utilization"

    @property
    def emits(self) -> bool:
        """Whether one chunk can run past snapshot points."""
        return self.scheduler().snapshot_mode == SnapshotMode.EMIT

    @property
    def num_filed(self) -> int:
        """Points that a row can file in one step."""
        return 1 + (self.max_emit_points if self.emits else 0)

    @property
    def num_requested(self) -> int:
        """Columns for a request's own points and those that the cache has learned."""
        return self.max_points + _LEARNED

    @property
    def num_points(self) -> int:
        """Explicit points that can be published of a row."""
        offsets = len(self.snapshot_from_start) + len(self.snapshot_from_end)
        return offsets + self.num_requested + 1

    def _limits(self) -> dict:
        return {
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "chunk_unit_size": self.block_size,
            "max_context_length": None,
            "strict": True,
        }

    def scheduler(self) -> SchedulerConfig:
        """The static part, for the planner."""
        return SchedulerConfig(
            chunking_policy=self.chunking_policy,
            snapshot_mode=self.snapshot_mode,
            max_emit_points=self.max_emit_points,
            group_by_lora=False,
        )

    def budget(self) -> Budget:
        """The limits of every step."""
        return budget(**self._limits())

    def snapshot_rules(self) -> SnapshotRules:
        """Where snapshots are due."""
        return snapshot_rules(
            interval=self.snapshot_interval,
            from_start=self.snapshot_from_start,
            from_end=self.snapshot_from_end,
            save_last=self.save_last,
            block_size=self.block_size,
            enable_prefix_caching=self.prefix_caching,
        )

    def hybrid(self) -> HybridConfig:
        """The tables of the cache."""
        new = self.max_num_batched_tokens + self.max_num_seqs * self.decode_steps
        published = new // self.block_size + 2 * self.max_num_seqs
        return HybridConfig(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            blocks_per_row=self.blocks_per_row,
            num_rows=self.max_num_seqs,
            num_snapshots=self.num_snapshots if self.prefix_caching else 0,
            num_admitted=1,
            max_commit_blocks=published,
            num_points=self.num_filed,
            num_ghosts=max(256, self.max_num_seqs * self.num_filed),
            num_seen=2**12,
            eviction=self.eviction,
            selection=_SELECTION.get(jax.default_backend(), Selection.SORT),
        )
