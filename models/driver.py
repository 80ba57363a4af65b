"""Runs sequences through a served model along given cuts, for checks and experiments.

No scheduler: the caller says which sequence computes how many tokens in which step, and
where states are filed. Every sequence has pages of its own; a restored one gets copies.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.core.config import NO_ID
from jaxsched.models.batch import StepShape, Work
from jaxsched.models.pools import Pools, copy_pages, init_pools
from jaxsched.models.serving import ServedModel


def _read(pools: Pools, slot: jax.Array) -> dict[str, jax.Array]:
    return {
        "ssm": pools.ssm[:, slot],
        "conv": pools.conv[:, slot].astype(jnp.float32),
        "tail": pools.tail[:, slot].astype(jnp.float32),
        "num_tail": pools.num_tail[slot],
    }


_read_state = jax.jit(_read)
_copy_pages = jax.jit(copy_pages, donate_argnums=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one sequence does in one step."""

    count: int
    decode: bool = False
    is_last: bool = False
    points: Mapping[int, int] = dataclasses.field(default_factory=dict)  # to file: slot


class Driver:
    """A pool, and the sequences that live in it."""

    def __init__(
        self,
        model: ServedModel,
        shape: StepShape,
        *,
        max_sequences: int,
        max_tokens: int,
        num_snapshots: int = 0,
        max_points: int = 0,
        page_size: int = 8,
        row_shape: StepShape | None = None,
    ):
        """Allocates pools for `max_sequences` sequences of at most `max_tokens`.

        Args:
          model: the model.
          shape: sizes of a step that has prefill in it.
          max_sequences: sequences at a time; slots 1 to that many are theirs.
          max_tokens: tokens of a sequence.
          num_snapshots: further slots, for states filed at points.
          max_points: points that one chunk can file.
          page_size: tokens of a page.
          row_shape: sizes of a step of decoding alone; default: as `shape`.
        """
        self.model, self.shape = model, shape
        self.row_shape = row_shape or shape
        self.max_sequences, self.max_points = max_sequences, max_points
        self._blocks = -(-max_tokens // page_size)
        self._page_size = page_size
        self.pools = init_pools(
            model.config,
            num_pages=max_sequences * self._blocks,
            page_size=page_size,
            num_slots=1 + max_sequences + num_snapshots,
            dtype=model.dtype,
            carry_tails=shape.carry_tails,
        )
        pages = np.arange(max_sequences * self._blocks, dtype=np.int32)
        self._tables = pages.reshape(max_sequences, self._blocks)
        self._tokens = np.zeros((max_sequences, max_tokens), np.int32)
        self._position = np.zeros(max_sequences, np.int32)
        self._load = np.zeros(max_sequences, np.int32)

    def snapshot_slot(self, index: int) -> int:
        """The slot of the `index`-th snapshot."""
        return 1 + self.max_sequences + index

    def position(self, sequence: int) -> int:
        """Tokens of a sequence that are computed."""
        return int(self._position[sequence])

    def start(self, sequence: int, token_ids: np.ndarray) -> None:
        """Begins a sequence from nothing."""
        self._tokens[sequence, : len(token_ids)] = token_ids
        self._position[sequence], self._load[sequence] = 0, 0

    def extend(self, sequence: int, token_ids: np.ndarray) -> None:
        """Gives a running sequence further tokens, as if they had been sampled."""
        self._tokens[sequence, : len(token_ids)] = token_ids

    def restore(
        self,
        sequence: int,
        token_ids: np.ndarray,
        source: int,
        position: int,
        slot: int,
    ) -> None:
        """Begins a sequence from a filed state and the keys of another sequence."""
        used = -(-position // self._page_size)
        past_end = self.max_sequences * self._blocks
        targets = np.full(self._blocks, past_end, np.int32)
        targets[:used] = self._tables[sequence, :used]
        self.pools = _copy_pages(
            self.pools, jnp.asarray(self._tables[source]), jnp.asarray(targets)
        )
        self._tokens[sequence, : len(token_ids)] = token_ids
        self._position[sequence], self._load[sequence] = position, slot

    def step(self, chunks: Mapping[int, Chunk]) -> dict[int, np.ndarray]:
        """Runs one step; returns the logits of each sequence's tokens of this step.

        Prefill gives f32[count, V] where the shape computes all logits, else f32[1, V]
        for a last chunk and nothing for others; decoding gives f32[1, V].
        """
        only_rows = all(chunk.decode for chunk in chunks.values())
        shape = self.row_shape if only_rows else self.shape
        work = self._work(chunks)
        self.pools, logits, batch = self.model.run_work(self.pools, work, shape)
        if int(batch.num_missed):
            raise ValueError(f"the step's work does not fit {shape}")
        logits, rows = np.asarray(logits), np.asarray(batch.logit_row)
        found = {}
        for sequence, chunk in chunks.items():
            if chunk.decode or shape.num_logits:
                at = rows[sequence]
                found[sequence] = logits[at : at + 1] if at != NO_ID else logits[:0]
            else:
                found[sequence] = logits[self._columns(batch, sequence, chunk)]
            self._position[sequence] += chunk.count
            self._load[sequence] = 1 + sequence
        return found

    def _columns(self, batch, sequence: int, chunk: Chunk) -> np.ndarray:
        """Flat columns of a chunk's tokens, found by the cells' page tables."""
        start = int(self._position[sequence])
        own = np.asarray(batch.cell_tables)[:, 0] == self._tables[sequence, 0]
        cells = np.flatnonzero(own & (np.asarray(batch.cell_fill) > 0))
        starts = np.asarray(batch.cell_start)
        size = self.shape.chunk_size
        positions = np.arange(start, start + chunk.count)
        by_start = {int(starts[cell]): int(cell) for cell in cells}
        return np.array(
            [by_start[p // size * size] * size + p % size for p in positions]
        )

    def _work(self, chunks: Mapping[int, Chunk]) -> Work:
        rows = self.max_sequences
        counts, slots = np.zeros(rows, np.int32), np.arange(1, rows + 1, dtype=np.int32)
        decode, last = np.zeros(rows, bool), np.zeros(rows, bool)
        points = np.full((rows, self.max_points), NO_ID, np.int32)
        targets = np.full((rows, self.max_points), NO_ID, np.int32)
        for sequence, chunk in chunks.items():
            counts[sequence] = chunk.count
            decode[sequence], last[sequence] = chunk.decode, chunk.is_last
            for column, (point, slot) in enumerate(sorted(chunk.points.items())):
                points[sequence, column], targets[sequence, column] = point, slot
        # Copies: on a CPU, jax may keep a view of an array that is changed later.
        return Work(
            token_ids=self._tokens.copy(),
            start=self._position.copy(),
            count=counts,
            is_decode=decode,
            is_last=last,
            block_tables=self._tables,
            load_slots=self._load.copy(),
            store_slots=slots,
            snapshot_points=points,
            snapshot_slots=targets,
        )

    def keys_and_values(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a sequence, [layers, T, kv heads, head dim] each."""
        pages = self._tables[sequence]
        found = []
        for stored in (self.pools.key_pages, self.pools.value_pages):
            values = np.asarray(stored[:, pages].astype(jnp.float32))
            length = values.shape[1] * values.shape[2]
            flat = values.reshape(len(values), length, *values.shape[3:])
            found.append(flat[:, : self.position(sequence)])
        return found[0], found[1]

    def state(self, slot: int) -> dict[str, np.ndarray]:
        """The stored state of a slot, one array a kind, layers first."""
        return {
            name: np.asarray(value)
            for name, value in _read_state(self.pools, np.int32(slot)).items()
        }


def run_cuts(
    driver: Driver,
    sequence: int,
    ends: Sequence[int],
    *,
    length: int,
    points: Mapping[int, int] | None = None,
) -> np.ndarray:
    """Prefills one sequence alone, chunk by chunk; returns all its logits."""
    found = []
    begin = driver.position(sequence)
    for end in ends:
        own = {p: s for p, s in (points or {}).items() if begin < p <= end}
        chunk = Chunk(count=end - begin, is_last=end == length, points=own)
        found.append(driver.step({sequence: chunk})[sequence])
        begin = end
    return np.concatenate(found)
