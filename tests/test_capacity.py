"""Invariant: admission counts blocks as published, and is one program for many tables.

Worked numbers of the block arithmetic, the published single-pass examples, the state's
constructor, and the properties of a pure function: padding, vmap and the number of
compilations change nothing.
"""

import dataclasses
import random

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsched
from capacity_generator import random_case
from jaxsched.core.config import MAX_COUNT, Reason
from jaxsched.scheduling.capacity import admit, hold_unadmitted
from jaxsched.scheduling.capacity_build import capacity_state
from jaxsched.scheduling.capacity_cases import answer_capacity_cases
from jaxsched.scheduling.capacity_needs import blocks_for_step, blocks_to_completion
from jaxsched.scheduling.capacity_state import CapacityConfig, Verdict
from jaxsched.scheduling.case_reading import CaseError
from oracles import capacity_records

GUARANTEED, MAX = "guaranteed_no_evict", "max_utilization"


# Compiled once, run a few times: most of the time would go into optimising it.
QUICK = {
    "compiler_options": {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
}
ADMIT = jax.jit(admit, static_argnames="config", **QUICK)


def window(tokens, free):
    return {"window": tokens, "free_blocks": free}


def arrays(requests, windows, block_size=10, count=16, **pools):
    """A table and a state from requests that carry both kinds of fields."""
    holds = ("allocated_blocks", "num_referenced_blocks", "new_block_key", "lora_pages")
    asks = [{k: v for k, v in r.items() if k not in holds} for r in requests]
    table = jaxsched.request_table(asks)
    state = capacity_state(
        [{k: v for k, v in r.items() if k in (*holds, "beam_width")} for r in requests],
        windows=windows,
        block_size=block_size,
        max_num_requests=count,
        num_rows=table.num_rows,
        **pools,
    )
    return table, state


def request(prompt, new, **fields):
    return {"num_prompt_tokens": prompt, "max_new_tokens": new, **fields}


def decode(prompt, new, output, held, **fields):
    held = [held] if isinstance(held, int) else held
    fields |= {"num_output_tokens": output, "allocated_blocks": held}
    return request(prompt, new, phase="decode", **fields)


def test_worked_numbers_of_blocks_to_completion():
    """Prompt 10, 80 new tokens, blocks of 10: 9 in all; beams share full blocks."""
    rows = [
        (request(10, 80), 90, 9),
        (decode(10, 80, 0, 1), 90, 8),
        (decode(10, 80, 0, 1), 1_000, 8),
        (request(10, 80, beam_width=4), 1_000, 1 + 8 * 4),
        (request(15, 80, beam_width=4), 1_000, 1 + 9 * 4),
        (request(10, 80), 50, 5 + 1),  # it slides: one block more while it moves
        (request(10, 80, num_referenced_blocks=1), 1_000, 8),
        (request(60, 10), 50, 5 + 1),
        (request(40, 5), 50, 5),
    ]
    for fields, tokens, expected in rows:
        table, state = arrays([fields], [window(tokens, 100)])
        found = jax.jit(blocks_to_completion)(table, state)
        assert found.tolist() == [[expected]], fields


def test_worked_numbers_of_blocks_for_a_step():
    rows = [
        (request(10, 80), 1_000, False, 1),
        (request(10, 80, num_draft_tokens=5), 1_000, False, 2),
        (request(10, 80, num_draft_tokens=10), 1_000, False, 2),
        (request(31, 80, num_computed_tokens=20), 1_000, False, 0),
        (request(15, 80, beam_width=3), 1_000, False, 1 + 3),
        (request(20, 80, beam_width=3), 1_000, False, 2),
        (decode(10, 80, 0, 1), 1_000, False, 1),
        (decode(10, 80, 1, 1), 1_000, False, 0),
        (decode(10, 80, 9, 2), 1_000, True, 1),
        (decode(10, 80, 10, 2, beam_width=3), 1_000, False, 3),
        (decode(10, 80, 10, 2), 20, False, 0),  # it slides: a block leaves for each new
        (decode(10, 80, 80, 9), 1_000, False, 0),
        (request(900, 80), 50, False, 13),
    ]
    for fields, tokens, two_steps, expected in rows:
        table, state = arrays(
            [fields], [window(tokens, 100)], two_step_lookahead=two_steps
        )
        found = jax.jit(blocks_for_step)(table, state)
        assert found.tolist() == [[expected]], fields


def _decoding(name, held, output=9):
    """A decode that holds `held` blocks and stands at the end of the last."""
    return {"id": name, **decode(10 * held - output, 50, output, held)}


def published_examples():
    """Policy, requests, pools, admitted, preempted."""
    fives = [{"id": at, **request(50, 1)} for at in range(2)]
    adapters = [
        {"id": at, **request(10, 10), "lora_id": lora, "lora_pages": 10}
        for at, lora in enumerate((1, 2))
    ]
    three = [
        {"id": at, **request(10, 10), "lora_id": at, "lora_pages": 10}
        for at in range(3)
    ]
    equal = [
        {"id": at, **request(21, 5), "new_block_key": 0, "num_computed_tokens": 0}
        for at in range(3)
    ]
    keyed = [{"id": at, **request(30, 5), "new_block_key": at} for at in range(2)]
    crossed = [
        {"id": at, **request(10, 5), "num_encoder_tokens": 10} for at in range(2)
    ]
    encoders = [
        {"id": at, **request(10, 5), "phase": "encode", "num_encoder_tokens": 90}
        for at in range(2)
    ]
    grows = {"id": 0, **decode(10, 50, 30, 4)}
    running = {"id": 0, **decode(40, 12, 1, 5)}
    two_kinds = [grows, {"id": 1, **request(70, 1)}]
    many = {"windows": [window(None, 99)]}
    return [
        (GUARANTEED, fives, {"windows": [window(None, 7)]}, [0], []),
        (MAX, [{"id": 0, **request(50, 1)}], {"windows": [window(None, 3)]}, [], []),
        (
            GUARANTEED,
            [running, *({**one, "id": one["id"] + 1} for one in fives)],
            {"windows": [window(None, 7)]},
            [0, 1],
            [],
        ),
        # Earlier rows are never preempted: the prompt waits.
        (MAX, two_kinds, {"windows": [window(None, 7)]}, [0], []),
        (GUARANTEED, adapters, {**many, "lora_pages": 15}, [0], []),
        (MAX, three, {**many, "lora_pages": 25}, [0, 1], []),
        (GUARANTEED, crossed, {**many, "free_cross_blocks": 1}, [0], []),
        (MAX, crossed, {**many, "free_cross_blocks": 1}, [0], []),
        (MAX, encoders, {**many, "free_cross_blocks": 0}, [0, 1], []),
        (GUARANTEED, encoders, {**many, "free_cross_blocks": 0}, [0, 1], []),
        (GUARANTEED, equal, {**many, "prefix_deferral": True}, [0], []),
        (MAX, equal, {**many, "prefix_deferral": True}, [0], []),
        (MAX, keyed, {**many, "prefix_deferral": True}, [0, 1], []),
        (GUARANTEED, equal, many, [0, 1, 2], []),
        # Room has to be in every window.
        (MAX, fives, {"windows": [window(None, 99), window(None, 7)]}, [0], []),
        # The last that started gives way, and gives back what it holds.
        (MAX, [_decoding(at, 2) for at in range(3)], {"windows": [window(None, 1)]},
         [0, 1], [2]),
        (MAX, [_decoding(at, 2) for at in range(3)], {"windows": [window(None, 0)]},
         [0, 1], [2]),
        (MAX, [_decoding(at, 1) for at in range(4)], {"windows": [window(None, 0)]},
         [0, 1], [3, 2]),
    ]  # fmt: skip


def test_published_examples():
    examples = published_examples()
    cases = [
        {
            "rules": "tensorrt_llm",
            "capacity": {
                "policy": policy,
                "max_num_requests": 16,
                "block_size": 10,
                **pools,
            },
            "requests": requests,
        }
        for policy, requests, pools, _, _ in examples
    ]
    answers = answer_capacity_cases(cases)
    for answer, (_, _, _, admitted, preempted) in zip(answers, examples, strict=True):
        assert (answer["admitted"], answer["preempted"]) == (admitted, preempted)


def test_an_encoder_without_its_pool_is_an_error_of_the_published_rules():
    case = {
        "capacity": {
            "policy": GUARANTEED,
            "max_num_requests": 4,
            "block_size": 4,
            "windows": [window(64, 9)],
        },
        "requests": [{"id": 0, **request(4, 4), "phase": "encode"}],
    }
    theirs, ours = answer_capacity_cases(
        [{**case, "rules": rules} for rules in ("tensorrt_llm", "jaxsched")]
    )
    assert "free_cross_blocks" in theirs["error"]
    assert ours["admitted"] == [0]


def test_rows_that_are_out_are_held_for_the_planner():
    requests = [request(20, 5), request(900, 5), request(90, 5, hold_reason="held")]
    table, state = arrays([*requests, request(90, 5)], [window(None, 11)])
    result = ADMIT(table, state, CapacityConfig(policy=MAX))
    reasons = hold_unadmitted(table, result).hold_reason.tolist()
    assert reasons == [
        Reason.SCHEDULED,
        Reason.TOO_LARGE,
        Reason.HELD,
        Reason.SCHEDULED,
    ]
    assert result.required_blocks[1, 0] == 90


def _random_arrays(seed, count, num_rows=16):
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        case = random_case(rng, "jaxsched", rich=False)
        pools = case["capacity"]
        if len(pools["windows"]) == 1 and case["requests"]:
            rows = [{k: v for k, v in r.items() if k != "id"} for r in case["requests"]]
            table, state = arrays(
                rows, pools["windows"], pools["block_size"], pools["max_num_requests"]
            )
            found.append((_pad(table, num_rows), _pad(state, num_rows)))
    return found


def _pad(tree, num_rows):
    """More rows of padding, with garbage in every field but the phase."""
    size = tree.num_rows if hasattr(tree, "num_rows") else tree.lora_pages.shape[0]
    fields = {}
    for field in dataclasses.fields(tree):
        array = np.asarray(getattr(tree, field.name))
        if array.ndim and array.shape[0] == size and field.name not in (
            "window", "free_blocks", "total_blocks"
        ):  # fmt: skip
            more = np.full((num_rows - size, *array.shape[1:]), 3, array.dtype)
            if field.name in ("phase", "hold_reason"):
                more[:] = 0
            array = np.concatenate([array, more])
        fields[field.name] = jnp.asarray(array)
    return type(tree)(**fields)


@pytest.mark.parametrize("rules", ["jaxsched", "tensorrt_llm"])
def test_padding_batching_and_repeating_change_nothing(rules):
    config = CapacityConfig(rules=rules, policy=MAX)
    chex.clear_trace_counter()
    traced = chex.assert_max_traces(lambda t, s: admit(t, s, config), 1)
    pass_of = jax.jit(traced, **QUICK)
    pairs = _random_arrays(7, 24)
    single = [pass_of(table, state) for table, state in pairs]
    wide = [(_pad(table, 32), _pad(state, 32)) for table, state in pairs]
    tables, states = jax.tree.map(lambda *rows: jnp.stack(rows), *wide)
    batched = jax.jit(jax.vmap(lambda t, s: admit(t, s, config)), **QUICK)
    batched = jax.device_get(batched(tables, states))
    for at, one in enumerate(single):
        other = jax.tree.map(lambda array, at=at: array[at], batched)
        assert (other.verdict[16:] == Verdict.EMPTY_ROW).all()
        other = jax.tree.map(lambda a: a[:16] if a.ndim else a, other)
        chex.assert_trees_all_equal(jax.device_get(one), other)


def test_limits_are_swept_by_one_program():
    table, state = arrays([request(50, 1)] * 4, [window(None, 0)])
    free = jnp.arange(0, 40, dtype=jnp.int32)[:, None]
    state = state.replace(total_blocks=jnp.asarray([1_000], jnp.int32))
    config = CapacityConfig(policy=MAX)

    def number_admitted(free_blocks):
        result = admit(table, state.replace(free_blocks=free_blocks), config)
        return jnp.sum(result.admitted.astype(jnp.int32))

    found = jax.jit(jax.vmap(number_admitted), **QUICK)(free)
    assert found.tolist() == [min(blocks // 5, 4) for blocks in range(40)]


def test_huge_counts_do_not_wrap():
    """Unlimited answers and pools: sums of block counts far above 32 bits."""
    limit = MAX_COUNT
    rows = [request(limit // 2, limit // 2, beam_width=2**15)] * 16
    for rules in ("jaxsched", "tensorrt_llm"):
        config = CapacityConfig(policy=GUARANTEED, rules=rules)
        for free, expected in ((None, 16), (2**29, 0)):
            table, state = arrays(rows, [window(None, free)], block_size=1)
            result = ADMIT(table, state, config)
            assert sum(result.admitted.tolist()) == expected


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"policy": "lottery"}, "policy"),
        ({"max_num_requests": 0}, "max_num_requests"),
        ({"block_size": 0}, "block_size"),
        ({"windows": []}, "windows"),
        ({"windows": [{"window": 4}]}, r"windows\[0\].free_blocks"),
        ({"windows": [{"window": 0, "free_blocks": 4}]}, r"windows\[0\].window"),
        ({"windows": [{**window(4, 4), "total_blocks": 3}]}, "total_blocks"),
        ({"lora_pages": -1}, "lora_pages"),
        ({"two_step_lookahead": 1}, "two_step_lookahead"),
        ({"prefix_deferral": "yes"}, "prefix_deferral"),
        ({"blocks": 4}, "blocks"),
    ],
)
def test_bad_pools_are_refused_by_name(change, field):
    pools = {"policy": MAX, "max_num_requests": 4, "block_size": 4}
    pools |= {"windows": [window(64, 9)], **change}
    with pytest.raises(CaseError, match=field):
        answer_capacity_cases([{"capacity": pools, "requests": []}])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"allocated_blocks": [1, 2]}, r"requests\[0\].allocated_blocks"),
        ({"allocated_blocks": [-1]}, r"allocated_blocks\[0\]"),
        ({"allocated_blocks": [2**29], "beam_width": 2}, "allocated_blocks"),
        ({"lora_pages": 3}, "lora_pages"),
        ({"new_state_slots": 1.5}, "new_state_slots"),
        ({"new_block_key": -2}, "new_block_key"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"pages": 3}, "pages"),
    ],
)
def test_bad_requests_are_refused_by_name(change, field):
    pools = {"policy": MAX, "max_num_requests": 4, "block_size": 4}
    pools["windows"] = [window(64, 9)]
    case = {"capacity": pools, "requests": [{"id": 0, **request(4, 4), **change}]}
    with pytest.raises(CaseError, match=field):
        answer_capacity_cases([case])


def test_one_adapter_has_one_size():
    rows = [{"id": at, **request(4, 4), "lora_id": 1} for at in range(2)]
    rows[0]["lora_pages"], rows[1]["lora_pages"] = 4, 5
    pools = {"policy": MAX, "max_num_requests": 4, "block_size": 4}
    pools["windows"] = [window(64, 9)]
    with pytest.raises(CaseError, match=r"requests\[1\].lora_pages must be 4"):
        answer_capacity_cases([{"capacity": pools, "requests": rows}])


def test_shapes_are_checked_when_traced():
    table, state = arrays([request(4, 4)], [window(64, 9)])
    wrong = state.replace(lora_pages=jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="CapacityState.lora_pages"):
        admit(table, wrong, CapacityConfig())
    with pytest.raises(ValueError, match="policy"):
        CapacityConfig(policy="first")
    with pytest.raises(ValueError, match="lora"):
        CapacityConfig(lora=1)


def test_the_oracle_and_the_package_number_verdicts_alike():
    assert [name.lower() for name in Verdict.__members__] == list(
        capacity_records.NAMES
    )
