"""A request's logits and states have the same bits in any schedule, mix and order.

Alone and uncut against: cut anywhere, batched with others at random paces, in another
row, decoding beside prefills, restored from a state filed on the way. Sizes are odd, so
that tails of vector loops would show. See `models.ssd` and `models.conv` for the rules
that keep the bits.
"""

import dataclasses
import random

import numpy as np
import pytest

from jaxsched.models.batch import StepShape
from jaxsched.models.driver import Chunk, Driver, run_cuts
from jaxsched.models.mixed_runs import run_mixed
from jaxsched.models.moe import MoeForm
from jaxsched.models.serving import ServedModel
from model_cases import TINY, tiny

LENGTH, ROWS, SPARE = 22, 3, 2
POINTS = (3, 4, 11, 16, 21)


class World:
    """A random model and its undisturbed answers."""

    def __init__(self, config, *, tails=True, cells=9, rows=3, **options):
        self.config = config
        self.model = ServedModel.random(self.config, seed=3, **options)
        shape = StepShape(
            chunk_size=4, num_cells=cells, num_rows=rows, carry_tails=tails
        )
        self.driver = Driver(
            self.model,
            shape,
            row_shape=dataclasses.replace(shape, num_cells=0),
            max_sequences=ROWS + SPARE,
            max_tokens=LENGTH,
            num_snapshots=2 * len(POINTS),
            max_points=len(POINTS),
            page_size=3,
        )
        made = np.random.default_rng(1)
        self.tokens = made.integers(0, self.config.vocab_size, (ROWS, LENGTH), np.int32)
        self.tails = tails
        self.whole = [self.prefill(row, [LENGTH]) for row in range(ROWS)]

    def prefill(self, row, ends, place=0, points=None):
        tokens = self.tokens[row][: ends[-1]]
        self.driver.start(place, tokens)
        return run_cuts(self.driver, place, ends, length=ends[-1], points=points)

    def slots(self, first=0):
        points = POINTS if self.tails else [p for p in POINTS if p % 4 == 0]
        return {p: self.driver.snapshot_slot(first + i) for i, p in enumerate(points)}

    def answer(self, row, prompt):
        """Logits of a row with its last tokens decoded one by one, alone."""
        logits = [self.prefill(row, [prompt])]
        self.driver.extend(0, self.tokens[row])
        for _ in range(prompt, LENGTH):
            logits.append(self.driver.step({0: Chunk(count=1, decode=True)})[0])
        return np.concatenate(logits)


def same_bits(got, right):
    np.testing.assert_array_equal(got.view(np.uint32), right.view(np.uint32))


def same_states(first, second):
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name], err_msg=name)


def check_cuts(world, draw, count):
    unit = 1 if world.tails else 4
    for number in range(count):
        row = number % ROWS
        cuts = draw.sample(
            range(unit, LENGTH, unit), draw.randint(1, LENGTH // unit - 1)
        )
        got = world.prefill(row, [*sorted(cuts), LENGTH], place=draw.randrange(ROWS))
        same_bits(got, world.whole[row])
    if world.tails:
        same_bits(world.prefill(0, list(range(1, LENGTH + 1))), world.whole[0])


def check_filed_states(world):
    """Emitted inside a chunk or left at its end: the same state, and it restores."""
    driver, cut = world.driver, world.slots(len(POINTS))
    world.prefill(1, [LENGTH], points=world.slots())
    world.prefill(1, [*sorted(cut), LENGTH], place=1, points=cut)
    for point, slot in world.slots().items():
        same_states(driver.state(slot), driver.state(cut[point]))
        driver.restore(2, world.tokens[1], 0, point, slot)
        ends = [LENGTH] if point % 2 else [min(point + 4, LENGTH), LENGTH]
        got = run_cuts(driver, 2, sorted(set(ends)), length=LENGTH)
        same_bits(got, world.whole[1][point:])


def check_mixes(world, draw, count):
    answers = {}
    for _ in range(count):
        prompts = [draw.choice([LENGTH, 17, 9]) for _ in range(ROWS)]
        places = draw.sample(range(ROWS + SPARE), ROWS)
        unit = 1 if world.tails else 4
        got = run_mixed(world.driver, world.tokens, prompts, places, draw, unit=unit)
        for row, prompt in enumerate(prompts):
            if (row, prompt) not in answers:
                answers[row, prompt] = world.answer(row, prompt)
            same_bits(got[row], answers[row, prompt])


def check(world, count):
    draw = random.Random(5)
    check_cuts(world, draw, count)
    check_filed_states(world)
    check_mixes(world, draw, count)


def test_any_cut_mix_and_restore():
    """The smallest family; `verify`'s own test does the same for a larger one."""
    check(World(tiny("mamba2", num_hidden_layers=1)), count=5)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(TINY))
@pytest.mark.parametrize("tails", [True, False])
def test_any_cut_mix_and_restore_in_every_family(family, tails):
    check(World(tiny(family), tails=tails), count=40)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["granitemoehybrid", "nemotron_h"])
def test_experts_in_a_ragged_product(family):
    check(World(tiny(family), form=MoeForm.RAGGED), count=20)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "falcon_h1", "granitemoehybrid"])
def test_bfloat16(family):
    check(World(tiny(family), dtype="bfloat16"), count=20)


@pytest.mark.slow
@pytest.mark.parametrize("cells, rows", [(7, 1), (11, 5), (16, 8)])
def test_other_buckets(cells, rows):
    check(World(tiny("bamba"), cells=cells, rows=rows), count=20)
