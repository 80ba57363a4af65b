"""Goodput and queueing count exactly what a list of requests, by hand, says."""

import dataclasses

import numpy as np
import pytest

from jaxsched.simulation.goodput import goodput, queue_depth, queueing, tpot_of_requests
from jaxsched.simulation.replay import Replay
from jaxsched.simulation.replay_clock import NEVER_PS
from jaxsched.simulation.replay_state import FinishReason

LENGTH, CANCELLED = FinishReason.LENGTH, FinishReason.CANCELLED
MS = 10**9

# arrival, admitted, first token, finish (ms; None: never), output tokens, how it ended
REQUESTS = (
    (0, 0, 100, 500, 5, LENGTH),  # 100 to the first, 100 each
    (100, 300, 400, 420, 2, LENGTH),  # 300 to the first, 20 each
    (100, 500, 600, 600, 1, LENGTH),  # 500 to the first, no time per token
    (200, None, None, 800, 0, CANCELLED),
    (250, None, None, None, 0, FinishReason.REFUSED),
)


def made(rows=REQUESTS):
    """A replay with only what these functions read."""
    run = object.__new__(Replay)
    times = np.array(
        [[NEVER_PS if t is None else t * MS for t in row[:4]] for row in rows],
        np.uint64,
    ).T
    fields = dict(
        zip(("arrival", "admitted", "first_token", "finish"), times, strict=True)
    )
    fields["num_output_tokens"] = np.array([row[4] for row in rows])
    fields["finish_reason"] = np.array([int(row[5]) for row in rows])
    for name, value in fields.items():
        object.__setattr__(run, name, value)
    assert set(fields) <= {field.name for field in dataclasses.fields(Replay)}
    return run


def test_good_requests_are_those_within_every_limit():
    found = goodput(made(), ttft_ms=350, tpot_ms=50)
    assert found["num_finished"] == 3 and found["num_good"] == 1
    assert found["num_too_late"] == {"ttft_ms": 1, "tpot_ms": 1, "e2e_ms": 0}
    assert found["good_share"] == 1 / 5
    # The last end is that of the cancelled one, at 800 ms.
    assert found["good_requests_per_s"] == pytest.approx(1 / 0.8)
    assert found["good_output_tokens_per_s"] == pytest.approx(2 / 0.8)


def test_limits_hold_at_their_value_and_one_token_has_no_time_per_token():
    assert goodput(made(), ttft_ms=500, tpot_ms=100)["num_good"] == 3
    assert goodput(made(), tpot_ms=1)["num_good"] == 1
    assert goodput(made(), e2e_ms=320)["num_too_late"]["e2e_ms"] == 2
    assert goodput(made())["num_good"] == 3


def test_looser_limits_never_lose_a_request():
    counts = [goodput(made(), ttft_ms=limit)["num_good"] for limit in range(1, 600, 7)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 3


@pytest.mark.parametrize("limit", [0, -1, True, "3", float("nan")])
def test_limits_that_are_none_are_refused(limit):
    with pytest.raises(ValueError, match="tpot_ms must be"):
        goodput(made(), tpot_ms=limit)


def test_times_per_token():
    found = tpot_of_requests(made())
    np.testing.assert_allclose(found, [100, 20, np.nan, np.nan, np.nan])


def test_the_queue_by_hand():
    # Waiting: 100-300, 100-500 and 200-800 ms (it gave up).
    depth, lasts = queue_depth(made())
    spent = {n: lasts[depth == n].sum() for n in (0, 1, 2, 3)}
    assert spent == pytest.approx({0: 0.1, 1: 0.3, 2: 0.3, 3: 0.1})
    found = queueing(made())
    assert found["depth_max"] == 3 and found["num_never_admitted"] == 2
    assert found["depth_mean"] == pytest.approx((0.3 + 0.6 + 0.3) / 0.8)
    assert found["depth_p50"] == 1 and found["depth_p90"] == 3
    waits = [0, 200, 400]
    assert found["wait_ms_mean"] == pytest.approx(200)
    assert found["wait_ms_p90"] == pytest.approx(np.percentile(waits, 90))


def test_nothing_admitted_is_said_and_not_computed():
    found = queueing(made(REQUESTS[-1:]))
    assert found["wait_ms_p50"] is None and found["depth_p50"] is None
    assert found["depth_max"] == 0
    found = goodput(made(REQUESTS[-1:]), ttft_ms=5)
    assert found["num_good"] == 0 and found["good_requests_per_s"] is None
