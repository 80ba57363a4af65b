"""The compiled plan: no loop over requests, one compilation a bucket, no transfers."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxsched as js
from planner_harness import quick_compile

POLICIES = tuple(js.ChunkingPolicy)
MAX_ROUNDS = 31  # a first fit halves what is left in every round


def _config(policy, **choices):
    return js.SchedulerConfig(chunking_policy=policy, **choices)


def _table(num_rows, records=({"num_prompt_tokens": 9},)):
    return js.request_table(records, num_rows=num_rows, num_points=4)


@functools.cache
def _program(config, num_rows):
    limits = js.budget(max_num_batched_tokens=8192)
    planner = quick_compile(functools.partial(js.schedule, config=config))
    return planner.lower(_table(num_rows), limits).compile().as_text()


def _loops(program):
    return len(re.findall(r" while\(", program))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rules", js.Rules)
def test_no_loop_grows_with_the_number_of_requests(policy, rules):
    """As many loops for 1,024 rows as for 64, and none that counts rows."""
    config = _config(policy, rules=rules)
    few, many = (_program(config, rows) for rows in (64, 1024))
    assert _loops(few) == _loops(many) <= 4
    for program in (few, many):
        trips = re.findall(r'known_trip_count":\{"n":"(\d+)"', program)
        assert all(int(trip) <= MAX_ROUNDS for trip in trips)


def test_the_other_form_is_seen_to_loop():
    """The test above can fail: a scan over the rows is a loop that counts them."""
    program = _program(_config("force_chunk", row_walk="sequential"), 64)
    assert '"n":"64"' in program


def test_a_first_fit_needs_few_rounds_whatever_the_rows(monkeypatch):
    """Rows of 1, 63, 1, 62, ... tokens: the rest falls as slowly as it can."""
    from jaxsched.scheduling import first_fit as module

    rounds = []

    def counted(unfinished, walk, state):
        while bool(unfinished(state)):
            rounds.append(int(state.left))
            state = walk(state)
        return state

    monkeypatch.setattr(module.lax, "while_loop", counted)
    offer = jnp.ravel(jnp.int32([[1, 4096 - step] for step in range(512)]))
    module.first_fit(offer, jnp.zeros_like(offer), jnp.int32(0), jnp.int32(4095))
    assert len(rounds) <= 12
    assert all(
        left > 2 * after for left, after in zip(rounds, rounds[2:], strict=False)
    )


@pytest.mark.parametrize("policy", ["force_chunk", "equal_progress"])
def test_one_compilation_serves_a_bucket(policy):
    chex.clear_trace_counter()
    planned = chex.assert_max_traces(js.schedule, n=1)
    planner = quick_compile(functools.partial(planned, config=_config(policy)))
    prompts = [{"num_prompt_tokens": 50 * at + 1} for at in range(8)]
    long = {"num_prompt_tokens": 1_000_000, "snapshot_interval": 16}
    decode = {"num_prompt_tokens": 5, "num_computed_tokens": 5, "phase": "decode"}
    for records in ([], prompts[:1], prompts, [long], [decode, *prompts[:3]]):
        for tokens, unit in ((64, 16), (8192, 64), (None, 1)):
            limits = js.budget(max_num_batched_tokens=tokens, chunk_unit_size=unit)
            plan = planner(_table(8, records), limits)
            assert int(plan.num_seqs) <= len(records)


def test_a_step_moves_nothing_between_host_and_device():
    config = _config("force_chunk")
    step = jax.jit(
        lambda table, limits: js.advance(
            table, js.schedule(js.publish(table, rules), limits, config)
        )
    )
    rules = js.snapshot_rules(interval=64)
    table, limits = _table(8), js.budget(max_num_batched_tokens=64)
    table = step(table, limits)
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            table = step(table, limits)
    assert int(table.num_output_tokens[0]) == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_the_number_of_steps_is_watched(policy):
    """Fusions of the compiled plan on a CPU; raise the bound only for a reason."""
    most = {"none": 110, "equal_progress": 260}.get(str(policy), 140)
    assert _program(_config(policy), 1024).count(" fusion(") <= most


@pytest.mark.parametrize(
    ("policy", "choices"),
    [
        ("force_chunk", {}),
        ("force_chunk", {"encoder_decoder": True}),
        ("none", {"snapshot_mode": "emit"}),
    ],
)
def test_every_scan_of_a_host_plan_is_one_kernel(optimized, policy, choices):
    """A CPU runs a scan that is too large for one kernel a hundred times slower."""
    if jax.default_backend() != "cpu":
        pytest.skip("rows are scanned on a CPU alone")
    config = _config(policy, **choices)
    program = js.HostPlanner(config, 256, num_points=64).compiled.as_text()
    main = program[program.index("ENTRY") :]
    assert _loops(main) == 0
    assert 3 <= main.count(" call(") <= 4
    assert main.count(" fusion(") <= 60
