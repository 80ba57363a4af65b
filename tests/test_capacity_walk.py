"""Invariant: sums of admission are exact, groups are found, no loop is needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsched
from jaxsched.scheduling.capacity import admit
from jaxsched.scheduling.capacity_build import capacity_state
from jaxsched.scheduling.capacity_state import CapacityConfig, CapacityPolicy
from jaxsched.scheduling.capacity_walk import exact_cumsum, exact_sum, group_rows


def test_running_sums_are_exact_until_they_are_held():
    rng = np.random.default_rng(0)
    counts = rng.integers(-(2**30), 2**30, (200, 3)).astype(np.int32)
    exact = np.clip(np.cumsum(counts.astype(np.int64), axis=0), -(2**30) + 1, 2**30 - 1)
    assert (np.asarray(exact_cumsum(jnp.asarray(counts))) == exact).all()
    assert (np.asarray(exact_sum(jnp.asarray(counts))) == exact[-1]).all()


def test_groups_have_their_first_row_as_leader():
    key = jnp.asarray([5, 5, 2, 5, 2, 9, 2], jnp.int32)
    other = jnp.asarray([0, 0, 0, 1, 0, 0, 0], jnp.int32)
    mask = jnp.asarray([True, True, True, True, True, False, True])
    groups = group_rows(key, other, mask)
    assert groups.leader.tolist() == [0, 0, 2, 3, 2, 7, 2]
    late = jnp.asarray([False, True, False, False, True, True, True])
    assert groups.is_first(late).tolist() == [i in (1, 4) for i in range(7)]
    assert groups.any_in_group(late).tolist() == [
        i in (0, 1, 2, 4, 6) for i in range(7)
    ]


@pytest.mark.parametrize("rules", ["jaxsched", "tensorrt_llm"])
@pytest.mark.parametrize("policy", list(CapacityPolicy))
def test_a_pass_has_no_loop_unless_adapters_or_deferral_ask_for_one(rules, policy):
    table = jaxsched.request_table([{"num_prompt_tokens": 4}] * 8)
    pools = {"windows": [{"window": 64, "free_blocks": 9}], "block_size": 4}
    state = capacity_state(num_rows=8, max_num_requests=4, **pools)

    def program(**features):
        config = CapacityConfig(rules=rules, policy=policy, **features)
        return str(jax.make_jaxpr(lambda t, s: admit(t, s, config))(table, state))

    assert "while[" not in program()
    if policy == CapacityPolicy.MAX_UTILIZATION:
        both = {"lora": True, "prefix_deferral": True}
        assert "while[" in program(**both)
