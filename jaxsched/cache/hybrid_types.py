"""`HybridConfig`, the static sizes of a hybrid cache, and `HybridCache`, its tables."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsched.cache.blocks import (
    BlockTable,
    RowTable,
    count_by_id,
    empty_blocks,
    empty_rows,
)
from jaxsched.cache.chains import StateChains, empty_chains
from jaxsched.cache.eviction import Costs, Eviction
from jaxsched.cache.ghosts import ReuseStats, empty_stats
from jaxsched.cache.index import PrefixIndex, empty_index
from jaxsched.cache.selection import Selection, worth_bits
from jaxsched.cache.states import StateTable, empty_states
from jaxsched.core.config import MAX_COUNT, UNLIMITED
from jaxsched.core.host import check_count

Array = jax.Array

_MIN_WORTH_BITS = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """Sizes and choices of a hybrid cache; static, so hashable.

    Args:
      block_size: tokens of a KV block.
      num_blocks: of the pool.
      blocks_per_row: width of a block table.
      num_rows: requests that run at a time.
      num_snapshots: snapshot slots.
      num_admitted: requests of one `lookup` and `reserve`.
      max_commit_blocks: most blocks that one step completes; at least the step's
        token budget / block_size + num_rows.
      num_points: most snapshots that one row files in one step.
      pages_per_snapshot: 0: snapshots have a pool of their own. Otherwise a snapshot
        lies in so many blocks of the KV pool, wherever they are.
      state_tokens: bytes of a snapshot in KV tokens; what scores weigh states with.
        0: pages_per_snapshot blocks, or one block.
      num_ghosts: entries of evicted snapshots that are remembered.
      num_seen: block keys remembered for fork detection after their KV is gone.
      eviction: see `Eviction`.
      selection: how victims are found, see `Selection`; the answers are the same.
      is_unlimited: the pools hold all that will ever be computed. Nothing is evicted,
        and nothing is kept up that only eviction reads, so no step costs more when
        the pools are larger. For simulation; see `unlimited`.
      key_bits: of each hash word; fewer than 32 only to test collisions.

    Raises:
      ValueError: naming the field and what would be right.
    """

    block_size: int
    num_blocks: int
    blocks_per_row: int
    num_rows: int
    num_snapshots: int
    num_admitted: int = 8
    max_commit_blocks: int = 256
    num_points: int = 1
    pages_per_snapshot: int = 0
    state_tokens: int = 0
    num_ghosts: int = 2048
    num_seen: int = 2**16
    eviction: Eviction = Eviction.REUSE_DENSITY
    selection: Selection = Selection.SORT
    key_bits: int = 32
    is_unlimited: bool = False

    def __post_init__(self):
        for field, low in (
            ("block_size", 1),
            ("num_blocks", 1),
            ("blocks_per_row", 1),
            ("num_rows", 1),
            ("num_snapshots", 0),
            ("num_admitted", 1),
            ("max_commit_blocks", 1),
            ("num_points", 1),
            ("pages_per_snapshot", 0),
            ("state_tokens", 0),
            ("num_ghosts", self.num_rows * self.num_points),
            ("num_seen", 1),
            ("key_bits", 1),
        ):
            check_count(field, getattr(self, field), low=low)
        check_count("key_bits", self.key_bits, low=1, high=32)
        object.__setattr__(self, "eviction", Eviction(self.eviction))
        object.__setattr__(self, "selection", Selection(self.selection))
        if self.num_seen & (self.num_seen - 1):
            raise ValueError(f"num_seen must be a power of two, got {self.num_seen}")
        if self.is_unlimited and self.is_shared:
            raise ValueError(
                f"pages_per_snapshot={self.pages_per_snapshot} shares a limited arena: "
                "set it to 0 or is_unlimited to False"
            )
        if self.worth_bits < _MIN_WORTH_BITS and not self.is_unlimited:
            raise ValueError(
                f"blocks_per_row={self.blocks_per_row} leaves {self.worth_bits} bits "
                f"to order by worth, {_MIN_WORTH_BITS} are needed: use larger blocks"
            )
        if self.blocks_per_row * self.block_size > MAX_COUNT:
            raise ValueError(
                f"blocks_per_row={self.blocks_per_row} times block_size="
                f"{self.block_size} is above {MAX_COUNT} tokens"
            )
        if self.pages_per_snapshot * self.num_snapshots > self.num_blocks:
            raise ValueError(
                f"num_snapshots={self.num_snapshots} of {self.pages_per_snapshot} "
                f"pages do not fit into num_blocks={self.num_blocks}: at most "
                f"{self.num_blocks // self.pages_per_snapshot} do"
            )

    @property
    def is_shared(self) -> bool:
        """Whether snapshots and KV blocks share one arena."""
        return self.pages_per_snapshot > 0

    @property
    def num_entries(self) -> int:
        """Snapshots and ghosts."""
        return self.num_snapshots + self.num_ghosts

    @property
    def num_slots(self) -> int:
        """Slots of the bulk arrays: the dummy, one a row, the snapshots."""
        return 1 + self.num_rows + self.num_snapshots

    @property
    def worth_bits(self) -> int:
        """Bits in which what a thing is worth is written."""
        return worth_bits(self.blocks_per_row)

    @property
    def path_rounds(self) -> int:
        """Doublings that reach from the end of the longest path to its start."""
        return max(self.blocks_per_row - 1, 1).bit_length()

    @property
    def snapshot_tokens(self) -> int:
        """Bytes of a snapshot in KV tokens."""
        return self.state_tokens or max(self.pages_per_snapshot, 1) * self.block_size

    @property
    def costs(self) -> Costs:
        """What evicting for KV blocks, or in a shared arena, frees."""
        return Costs(float(self.snapshot_tokens if self.is_shared else 1), 1.0)

    @property
    def slot_costs(self) -> Costs:
        """What evicting for a snapshot slot frees."""
        return self.costs if self.is_shared else Costs(1.0, 0.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HybridCache:
    """All tables of a hybrid cache; bulk KV pages and states are elsewhere."""

    blocks: BlockTable
    index: PrefixIndex
    rows: RowTable
    states: StateTable
    stats: ReuseStats
    slot_pages: Array  # i32[S, P]  blocks that hold each slot's state, shared arena
    seen: Array  # u32[M]  marks of block keys once computed, by their bucket
    tick: Array  # i32[]  one a call
    block_limit: Array  # i32[]  blocks in use by configuration, at most N
    snapshot_limit: Array  # i32[]  snapshots in use, at most those allocated
    path_limit: Array  # i32[]  most snapshots on one path; UNLIMITED: no cap
    num_handed_out: Array  # i32[]  blocks from here on no row has ever held
    num_evicted_blocks: Array  # i32[]  so far
    num_evicted_snapshots: Array  # i32[]  so far
    chains: StateChains  # unlimited pools: states by the block boundary before them

    def replace(self, **fields) -> "HybridCache":
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)

    @property
    def hanging(self) -> Array:
        """How many snapshots hang on each block, i32[N]."""
        states = self.states
        return count_by_id(states.block, states.resident, self.blocks.num_blocks)

    @property
    def in_tree(self) -> Array:
        """Blocks that are indexed or carry a snapshot, bool[N]."""
        return (self.blocks.place >= 0) | (self.hanging > 0)


def empty_cache(
    config: HybridConfig,
    *,
    num_blocks: int | None = None,
    num_snapshots: int | None = None,
    path_limit: int | None = None,
) -> HybridCache:
    """A cache that holds nothing.

    Args:
      config: static sizes.
      num_blocks: in use, at most those of the configuration; sweep it as an array.
      num_snapshots: the same for snapshots.
      path_limit: most snapshots kept on one path; forks do not go for it.

    Raises:
      ValueError: naming the argument that is out of range.
    """
    blocks = config.num_blocks if num_blocks is None else num_blocks
    slots = config.num_snapshots if num_snapshots is None else num_snapshots
    check_count("num_blocks", blocks, high=config.num_blocks)
    check_count("num_snapshots", slots, high=config.num_snapshots)
    limit = UNLIMITED
    if path_limit is not None:
        limit = check_count("path_limit", path_limit, low=1)
    pages = max(config.pages_per_snapshot, 1)
    return HybridCache(
        blocks=empty_blocks(config.num_blocks, config.block_size),
        index=empty_index(config.num_blocks),
        rows=empty_rows(config.num_rows, config.blocks_per_row, config.num_blocks),
        states=empty_states(config.num_entries),
        stats=empty_stats(),
        slot_pages=jnp.full((config.num_slots, pages), config.num_blocks, jnp.int32),
        seen=jnp.zeros(config.num_seen, jnp.uint32),
        tick=jnp.int32(0),
        block_limit=jnp.int32(blocks),
        snapshot_limit=jnp.int32(slots),
        path_limit=jnp.int32(limit),
        num_handed_out=jnp.int32(0),
        num_evicted_blocks=jnp.int32(0),
        num_evicted_snapshots=jnp.int32(0),
        chains=empty_chains(config.num_entries if config.is_unlimited else 1),
    )
