"""Invariant: on every small table, each field of a plan equals the sequential oracle's.

Complete, not sampled, for all twelve programs (both rule sets, four policies, cut and
emit):

- fast: all tables of 2 rows out of 14 (prefills of 1 to 13 tokens at several cursors
  with points, an interval, reuse and drafts; decodes of two widths; an encoder input;
  a row in flight) under 12 limits: 196 x 12 tables a program, 28,224 in all;
- slow: all tables of 3 such rows under 24 limits (2,744 x 24 a program, 790,272 in
  all) and all tables of 2 rows out of a grid of 43 under 60 limits (1,849 x 60 a
  program, 1,331,280 in all).
"""

import itertools

import pytest

from generators import (
    CONFIGS,
    SAME,
    all_cases,
    all_limits,
    decode,
    encode,
    prefill,
)
from oracles.records import UNLIMITED
from planner_harness import assert_same_plans, product_of

CHOICES = (
    prefill(1, interval=3),
    prefill(5, drafts=2),
    prefill(8, interval=4),
    prefill(13, points=[3, 7]),
    prefill(13, computed=6, cached=0, points=[12, 9, 6]),
    prefill(9, computed=3, reuse=4),
    prefill(9, reuse=9, drafts=3),
    prefill(6, computed=5, cached=0, lora_id=1),
    prefill(11, interval=5, reuse=6, lora_id=0),
    prefill(4, in_flight=True),
    decode(),
    decode(drafts=3, lora_id=2, computed=6),
    decode(beam=2, drafts=1),
    encode(3),
)
LIMITS = all_limits((2, 4, 7, 12), (1, 2), (1, 4), (SAME,))
LIMITS += all_limits((9, UNLIMITED), (2,), (4, 5), (3, 6))
QUICK_LIMITS = all_limits((2, 5, 9), (1, 2), (3,), (SAME,))
QUICK_LIMITS += all_limits((12,), (2,), (1, 4), (SAME,))
QUICK_LIMITS += all_limits((9, UNLIMITED), (2,), (4,), (3, 6))

GRID = (
    *(
        prefill(prompt, computed, reuse=reuse, points=points, drafts=2)
        for prompt, computed in ((2, 0), (8, 0), (8, 3), (11, 7))
        for reuse in (0, 2, 20)
        for points in ([], [4, 9, 1])
    ),
    *(
        prefill(choice.pop("prompt"), 0, **choice)
        for choice in product_of(
            prompt=(3, 10), interval=(1, 4), drafts=(0, 3), lora_id=(-1, 1)
        )
    ),
    decode(drafts=6),
    decode(beam=3, drafts=2),
    encode(5),
)
GRID_LIMITS = all_limits((1, 3, 6, 11, UNLIMITED), (1, 2), (1, 3, 4), (SAME, 5))
CHUNK = 1 << 14


def name_of(config):
    """A readable test id."""
    return "-".join(str(part) for part in config[:3])


FORMS = [(config, "parallel") for config in CONFIGS] + [
    (config, "sequential") for config in CONFIGS if config[0] == "jaxsched"
]
forms = pytest.mark.parametrize(
    ("config", "row_walk"), FORMS, ids=[f"{name_of(c)}-{walk}" for c, walk in FORMS]
)


def check_all(cases, row_walk):
    """Streams cases through the comparison; returns how many there were."""
    count = 0
    cases = iter(cases)
    while part := list(itertools.islice(cases, CHUNK)):
        assert_same_plans(part, row_walk=row_walk)
        count += len(part)
    return count


@forms
def test_every_table_of_two_rows(config, row_walk):
    assert check_all(all_cases(config, CHOICES, 2, QUICK_LIMITS), row_walk) == 196 * 12


@pytest.mark.slow
@forms
def test_every_table_of_three_rows(config, row_walk):
    assert check_all(all_cases(config, CHOICES, 3, LIMITS), row_walk) == 2744 * 24


@pytest.mark.slow
@forms
def test_every_pair_of_the_wide_grid(config, row_walk):
    assert check_all(all_cases(config, GRID, 2, GRID_LIMITS), row_walk) == 1849 * 60
