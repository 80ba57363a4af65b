"""Invariants 3 to 6 after every call of random traffic, against real token lists."""

import dataclasses

import pytest

from cache_harness import TINY, Traffic

POLICIES = (
    "lru_paths",
    "lru_leaves",
    "lru_states",
    "superseded",
    "greedy_dual",
    "age_histogram",
    "reuse_density",
    "clairvoyant",
)


def _run(config, operations, seed=0, **limits):
    traffic = Traffic(config, seed, **limits)
    while traffic.operations < operations:
        traffic.step()
    return traffic


@pytest.mark.parametrize("pages", [0, 2])
def test_random_traffic_keeps_every_invariant(pages):
    policy = "reuse_density" if pages else "lru_paths"
    config = dataclasses.replace(TINY, pages_per_snapshot=pages, eviction=policy)
    traffic = _run(config, 600)
    # An arena shared with the pages of so tiny a cache keeps few snapshots.
    assert traffic.hits > (2 if pages else 20) and traffic.evicted > 100
