"""The plain whole-sequence model gives the published logits and states."""

import jax
import numpy as np
import pytest

from jaxsched.models.checkpoint import read_tensors
from jaxsched.models.loading import load_checkpoint
from jaxsched.models.reference import run_reference
from model_cases import FALCON, NEMOTRON, SHARED
from shared_data import shared_path


class Published:
    """A folder's plain model, compiled once, and what it should give."""

    def __init__(self, folder, bar):
        self.config, self.parameters = load_checkpoint(folder)
        self.tokens = np.load(folder / "tokens.npy")
        self.logits = np.load(folder / "logits.npy")
        files = {int(p.stem[5:]): p for p in folder.glob("snap_*.safetensors")}
        self.states = {point: read_tensors(files[point]) for point in sorted(files)}
        self.bar = bar
        points = list(self.states)
        self._run = jax.jit(lambda p, t: run_reference(self.config, p, t, points))

    def run(self, tokens):
        return self._run(self.parameters, tokens)

    def close(self, got, right):
        np.testing.assert_allclose(got, right, rtol=self.bar, atol=self.bar)

    def check(self):
        for row, tokens in enumerate(self.tokens):
            got, states = self.run(tokens)
            self.close(got, self.logits[row])
            for index, stored in enumerate(self.states.values()):
                for name, right in stored.items():
                    if "recurrent_state" in name:
                        own = f"{name.removesuffix('.recurrent_state.0')}.ssm"
                        self.close(states[own][index], right[row])


@pytest.fixture(scope="module")
def mixed():
    return Published(NEMOTRON, 1e-5)


def test_published_logits(mixed):
    mixed.check()


def test_no_token_sees_a_later_one(mixed):
    tokens = mixed.tokens[0]
    changed = np.where(np.arange(len(tokens)) < 20, tokens, 5).astype(np.int32)
    first, second = mixed.run(tokens)[0], mixed.run(changed)[0]
    np.testing.assert_array_equal(first[:20], second[:20])
    assert (np.asarray(first[20:]) != np.asarray(second[20:])).any()


@pytest.mark.slow
def test_published_states():
    found = Published(FALCON, 1e-5)
    assert list(found.states) == [5, 16]
    found.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_published_logits_and_states_of_every_family(name):
    bar = 5e-5 if name == "zamba2" else 1e-5
    Published(shared_path(f"fixtures/{name}"), bar).check()
