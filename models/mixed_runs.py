"""Several sequences through one driver at random paces, prefill and decode mixed."""

import random
from collections.abc import Sequence

import numpy as np

from jaxsched.models.driver import Chunk, Driver


def run_mixed(
    driver: Driver,
    tokens: np.ndarray,
    prompts: Sequence[int],
    places: Sequence[int],
    random_: random.Random,
    *,
    unit: int = 1,
) -> list[np.ndarray]:
    """Runs every row to its end and returns all its logits.

    Args:
      driver: with room for every row, and a shape that computes all logits.
      tokens: i32[rows, length].
      prompts: how many tokens of each row are prefilled; the others are decoded, as if
        they had been sampled.
      places: the driver's sequence that each row runs as, so that rows lie in the batch
        in another order.
      random_: draws the paces.
      unit: chunk ends other than a prompt's last are multiples of it.
    """
    rows, length = tokens.shape
    found: list[list[np.ndarray]] = [[] for _ in range(rows)]
    for row, place in enumerate(places):
        driver.start(place, tokens[row])
    at = [0] * rows
    while any(position < length for position in at):
        chunks = {}
        cells, lanes = driver.shape.num_cells, driver.shape.num_rows
        for row in random_.sample(range(rows), rows):
            position = at[row]
            if position >= length or (random_.random() < 0.3 and chunks):
                continue
            if position >= prompts[row]:
                if lanes:
                    chunks[row] = Chunk(count=1, decode=True)
                    lanes -= 1
                continue
            chunk, needed = _prefill(
                driver, position, prompts[row], cells, unit, random_
            )
            if chunk is not None:
                chunks[row], cells = chunk, cells - needed
        logits = driver.step({places[row]: chunk for row, chunk in chunks.items()})
        for row, chunk in chunks.items():
            found[row].append(logits[places[row]])
            at[row] += chunk.count
    return [np.concatenate(parts) for parts in found]


def _prefill(
    driver: Driver,
    position: int,
    prompt: int,
    cells: int,
    unit: int,
    random_: random.Random,
) -> tuple[Chunk | None, int]:
    """A random chunk that fits the cells that are left, and how many it takes."""
    size = driver.shape.chunk_size
    furthest = min(prompt, (position // size + cells) * size)
    if furthest <= position:
        return None, 0
    end = random_.randint(position + 1, furthest)
    if end < prompt:
        end = end // unit * unit
    if end <= position:
        end = furthest if furthest == prompt else furthest // unit * unit
    if end <= position:
        return None, 0
    needed = -(-end // size) - position // size
    return Chunk(count=end - position, is_last=end == prompt), needed
