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


def _config(**choices):
    return dataclasses.replace(TINY, **choices)


def test_recency_in_pools_of_their_own():
    traffic = _run(_config(), 500)
    assert traffic.hits > 15 and traffic.evicted > 100 and traffic.explained > 20


def test_learned_reuse_in_one_arena():
    config = _config(
        eviction="reuse_density", pages_per_snapshot=2, num_blocks=44, selection="sort"
    )
    traffic = _run(config, 400)
    assert traffic.hits > 15 and traffic.evicted > 50


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pages", [0, 2])
def test_every_policy_keeps_every_invariant(policy, pages):
    """Sixteen runs that together make more than a million operations."""
    config = _config(
        eviction=policy, pages_per_snapshot=pages, num_blocks=44 if pages else 26
    )
    assert _run(config, 64_000, seed=1).hits > 500


@pytest.mark.slow
@pytest.mark.parametrize("bits", [3, 6])
@pytest.mark.parametrize("pages", [0, 2])
def test_collisions_cost_hits_and_never_give_a_wrong_one(bits, pages):
    config = _config(
        key_bits=bits, pages_per_snapshot=pages, num_blocks=44 if pages else 26
    )
    assert _run(config, 10_000, seed=bits).hits > 100


@pytest.mark.slow
def test_smaller_limits_and_a_cap_a_path():
    config = _config(eviction="reuse_density", num_blocks=40, num_snapshots=9)
    traffic = _run(config, 10_000, num_blocks=24, num_snapshots=5, path_limit=2)
    assert traffic.evicted > 1000
