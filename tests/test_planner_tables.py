"""Invariant: the numeric examples known of the published scheduler come out exactly.

Tables of chunk sizes, cursors, kept drafts and batches under the `tensorrt_llm`
rules, from TensorRT-LLM's public tests and from runs of its Python scheduler (after
PR #16427). Every plan is held against the oracle, too.
"""

import dataclasses

import pytest

from generators import decode, prefill
from oracles.planner_advance import advance
from oracles.planner_common import chunk_cost
from oracles.records import UNLIMITED
from planner_harness import ask, plan_one, sizes

FORCE, FCFS, EQUAL = "force_chunk", "first_come_first_served", "equal_progress"
NONE = UNLIMITED


def published(prompt, unit):
    """A prompt with a point on every multiple of the unit."""
    return prefill(prompt, interval=unit)


@pytest.mark.parametrize(
    ("prompts", "unit", "budget", "steps"),
    [
        ([30], 10, NONE, [[10]]),
        ([8], 20, NONE, [[8]]),
        ([10], 10, NONE, [[10]]),
        ([25, 15, 5], 10, NONE, [[10, 10, 5]]),
        ([30, 30], 10, 15, [[10, 0]]),
        ([30, 30], 10, 20, [[10, 10]]),
        ([25], 10, NONE, [[10], [20], [25]]),
        ([25, 12], 10, NONE, [[10, 10], [20, 12], [25, 12]]),
        ([25, 25], 10, 15, [[10, 0], [20, 0], [25, 10], [25, 20], [25, 25]]),
        ([30], 10, 100, [[10]]),
    ],
)
def test_forced_chunks_end_on_published_multiples(prompts, unit, budget, steps):
    rows = [published(prompt, unit) for prompt in prompts]
    assert cursors(ask(rows, FORCE, budget, unit, context=NONE), len(steps)) == steps


def cursors(case, steps):
    """Cursors inside the prompts after each of some steps of prefilling alone.

    A prompt that is through is held, so that its decode takes no budget.
    """
    seen = []
    for _ in range(steps):
        case = advance(case, plan_one(case))
        for row in case.rows:
            row.in_flight = row.phase != "prefill"
        seen.append([row.num_computed_tokens for row in case.rows])
    return seen


def test_forced_chunks_beside_a_decode():
    case = ask([published(30, 10), decode()], FORCE, 15, 10)
    assert sizes(case) == [10, 1]


@pytest.mark.parametrize(
    ("row", "unit", "budget", "context", "size"),
    [
        (prefill(30), 10, NONE, NONE, 30),
        (prefill(100, points=[64]), 16, 50, NONE, 48),
        (prefill(100, points=[64]), 16, NONE, 40, 32),
        (prefill(100), 16, 99, NONE, 96),
        (prefill(100, points=[7]), 10, NONE, NONE, 7),
        (prefill(100, points=[7]), 10, 6, NONE, 0),
        (prefill(30, points=[64]), 10, NONE, NONE, 30),
        (prefill(200, 5, points=[64, 128]), 16, 50, NONE, 48),
        (prefill(128, 64, points=[64]), 16, NONE, NONE, 64),
    ],
)
def test_one_forced_chunk(row, unit, budget, context, size):
    assert sizes(ask([row], FORCE, budget, unit, context=context)) == [size]


def test_a_forced_row_that_gets_nothing_does_not_stop_the_others():
    case = ask([prefill(20), prefill(3)], FORCE, 4, 5, context=NONE)
    assert sizes(case) == [0, 3]


def test_the_reuse_cost_is_the_three_way_rule():
    """A window that shifts costs its size; one that reaches the end costs the rest."""
    for remaining in range(1, 12):
        for reuse in range(14):
            for size in range(remaining + 1):
                if reuse == 0 or reuse + size < remaining:
                    cost = size
                else:
                    cost = max(0, remaining - reuse)
                row = prefill(remaining, reuse=reuse)
                case = ask([row], FCFS, 1)
                # The published rule is met with a size of 0 only where it costs 0.
                assert chunk_cost(case, row, size) == min(size, cost)


DIRECT = [
    # prompts, unit, budget, context, equal_progress, first_come_first_served
    ([25, 25], 20, NONE, NONE, [[25, 25]], None),
    ([25, 25], 100, NONE, 20, [[0, 0]], None),
    ([25, 25], 30, NONE, 25, [[25, 25]], None),
    ([10, 25], 10, NONE, 20, [[10, 20], [10, 25]], None),
    ([25, 25], 20, 20, NONE, [[20, 0], [25, 0], [25, 20], [25, 25]], None),
    ([25, 25], 20, 10, NONE, [[0, 0]], None),
    ([25, 25], 5, 30, NONE, [[15, 15], [25, 25]], [[25, 5], [25, 25]]),
    ([25, 15], 5, 30, NONE, [[15, 15], [25, 15]], [[25, 5], [25, 15]]),
    ([25, 15], 5, 30, 10, [[10, 10], [20, 15], [25, 15]], None),
    (
        [25, 25],
        5,
        15,
        NONE,
        [[10, 5], [20, 10], [25, 20], [25, 25]],
        [[15, 0], [25, 5], [25, 20], [25, 25]],
    ),
]


@pytest.mark.parametrize(("prompts", "unit", "budget", "context", "ep", "fcfs"), DIRECT)
def test_the_direct_table(prompts, unit, budget, context, ep, fcfs):
    rows = [prefill(prompt) for prompt in prompts]
    for policy, steps in ((EQUAL, ep), (FCFS, fcfs or ep)):
        case = ask(rows, policy, budget, unit, context=context)
        assert cursors(case, len(steps)) == steps


WITH_DRAFTS = [
    # prompts, unit, budget, context, equal_progress, first_come_first_served, kept
    ([27, 27], 5, 30, NONE, [[15, 15], [27, 27]], [[27, 0], [27, 27]], 3),
    ([17, 17], 5, 30, NONE, [[15, 15], [17, 17]], [[17, 10], [17, 17]], 3),
    (
        [27, 27],
        5,
        20,
        NONE,
        [[10, 10], [20, 20], [27, 27]],
        [[20, 0], [27, 10], [27, 27]],
        3,
    ),
    ([23, 17], 5, 20, NONE, [[10, 10], [23, 17]], [[20, 0], [23, 17]], 0),
    ([6, 6], 5, 30, 10, [[6, 6]], [[6, 6]], 4),
    ([25, 25], 5, 50, NONE, [[25, 25]], [[25, 25]], 0),
    ([25, 25], 5, 25, NONE, [[15, 10], [25, 25]], [[25, 0], [25, 25]], 0),
    ([25, 25], 10, 30, NONE, [[20, 10], [25, 25]], [[25, 0], [25, 25]], 5),
]


def with_chunk_pass(case):
    """The same step with the chunk pass, which is left out where everything fits.

    A context limit one below a row and its drafts is enough to ask for it.
    """
    open_rows = [row for row in case.rows if row.phase == "prefill"]
    wanted = [row.remaining + row.num_draft_tokens for row in open_rows]
    if sum(wanted) > case.max_num_batched_tokens:
        return case
    context = min(case.max_context_length, max(wanted) - 1)
    unit = case.chunk_unit_size
    if any(-row.remaining % unit > context - row.remaining for row in open_rows):
        return case  # It would bind: here the drafts fill the last unit anyway.
    return dataclasses.replace(case, max_context_length=context)


@pytest.mark.parametrize(
    ("prompts", "unit", "budget", "context", "ep", "fcfs", "kept"), WITH_DRAFTS
)
def test_the_direct_table_with_drafts(prompts, unit, budget, context, ep, fcfs, kept):
    rows = [prefill(prompt, drafts=5) for prompt in prompts]
    for policy, steps in ((EQUAL, ep), (FCFS, fcfs)):
        case = ask(rows, policy, budget, unit, context=context)
        last, trail = {}, []
        for _ in steps:
            answer = plan_one(with_chunk_pass(case))
            for index, row in enumerate(case.rows):
                if answer.is_last_chunk[index]:
                    last[row.id] = answer.num_draft_tokens[index]
            case = advance(case, answer)
            for row in case.rows:
                row.in_flight = row.phase != "prefill"
            trail.append([row.num_computed_tokens for row in case.rows])
        assert trail == steps
        assert set(last.values()) == {kept}


@pytest.mark.parametrize(("prompt", "kept"), [(4128, 0), (4127, 1), (4125, 3)])
def test_drafts_stay_inside_the_context_limit(prompt, kept):
    case = ask([prefill(prompt, drafts=3)], FCFS, NONE, 64, context=4128)
    assert plan_one(case).num_draft_tokens == [kept]


@pytest.mark.parametrize(
    ("rows", "unit", "budget", "context", "kept"),
    [
        ([(2041, 8)] * 4, 64, 8192, 8192, [7, 7, 7, 7]),
        ([(6, 5)] * 2, 5, NONE, 10, [4, 4]),
        ([(3, 17)] * 3, 16, 40, 64, [13, 13, 5]),
        ([(8, 0), (8, 0), (3, 13)], 16, 28, 28, [0, 0, 9]),
        ([(3, 1), (3, 13), (3, 13)], 16, 30, 30, [1, 13, 7]),
    ],
)
def test_drafts_share_the_budget_in_order(rows, unit, budget, context, kept):
    rows = [prefill(prompt, drafts=drafts) for prompt, drafts in rows]
    answer = plan_one(ask(rows, FCFS, budget, unit, context=context))
    assert answer.num_scheduled_tokens == [row.num_prompt_tokens for row in rows]
    assert answer.num_draft_tokens == kept


def test_drafts_stay_whole_where_everything_fits():
    """Prompt 5, unit 5, 3 drafts, 20 tokens: only the forced policy fits them."""
    row = prefill(5, drafts=3)
    assert plan_one(ask([row], FCFS, 20, 5)).num_draft_tokens == [3]
    assert plan_one(ask([row], FORCE, 20, 5)).num_draft_tokens == [0]


@pytest.mark.parametrize(
    ("rows", "policy", "unit", "budget", "context", "expected"),
    [
        ([(12, 0)] * 2, EQUAL, 5, 7, NONE, [5, 0]),
        ([(15, 8)] * 3, FCFS, 1, 20, 20, [15, 15, 6]),
        ([(15, 10), (15, 0)], EQUAL, 1, 15, 15, [10, 10]),
        ([(15, 0), (15, 0)], EQUAL, 1, 15, 15, [8, 7]),
        ([(20, 10)], FCFS, 5, 15, 15, [20]),
        ([(30, 20), (60, 0)], EQUAL, 5, NONE, 12, [10, 10]),
        ([(30, 20), (60, 0)], FCFS, 5, NONE, 12, [30, 10]),
        ([(20, 0), (3, 0)], FCFS, 5, 4, NONE, [0, 3]),
        ([(20, 15)] * 2, "none", 1, 20, 20, [20, 20]),
        ([(10, 15), (10, 0)], "none", 1, 10, 10, [10, 0]),
        ([(30, 20), (20, 0)], "none", 1, 30, 30, [30, 20]),
    ],
)
def test_reuse_and_small_budgets(rows, policy, unit, budget, context, expected):
    rows = [prefill(prompt, reuse=reuse) for prompt, reuse in rows]
    assert sizes(ask(rows, policy, budget, unit, context=context)) == expected


def test_full_reuse_is_granted_at_zero_capacity_by_fcfs_alone():
    rows = [decode(beam=4), prefill(9, reuse=9)]
    assert sizes(ask(rows, FCFS, 4, 1)) == [4, 9]
    assert sizes(ask([*rows, prefill(5)], EQUAL, 4, 1)) == [4, 0, 0]


@pytest.mark.parametrize(
    ("rows", "policy", "unit", "budget", "seqs", "scheduled"),
    [
        ([prefill(10)] * 3, "none", 1, NONE, 2, [0, 1]),
        ([prefill(10)] * 2, "none", 1, 15, 4, [0]),
        ([prefill(10), decode(), decode()], "none", 1, 12, 4, [0, 1, 2]),
        ([prefill(10), decode(4), decode(4)], "none", 1, 15, 4, [0, 1]),
        ([decode(1), decode(4), decode(1)], "none", 1, NONE, 4, [0, 2]),
        ([prefill(10, drafts=3), decode(drafts=2)], "none", 1, 15, 4, [0]),
        ([decode(drafts=3)] * 3, "none", 1, 10, 4, [0, 1]),
        ([decode(drafts=63)] * 4, "none", 1, 128, 4, [0, 1]),
        (
            [decode(in_flight=True), decode(), decode(in_flight=True)],
            "none",
            1,
            NONE,
            4,
            [1],
        ),
        ([prefill(20), prefill(20), decode()], FCFS, 5, 10, 2, [0]),
    ],
)
def test_who_is_in_the_batch(rows, policy, unit, budget, seqs, scheduled):
    answer = plan_one(ask(rows, policy, budget, unit, seqs=seqs))
    assert sorted(row for row in answer.order if row >= 0) == scheduled


def test_decodes_take_the_budget_whatever_the_order():
    case = ask([prefill(20), *[decode()] * 4], FCFS, 9, 5)
    assert sizes(case) == [5, 1, 1, 1, 1]


def test_the_whole_prompt_is_measured_without_chunking():
    """Prompt 30 at cursor 10 under 29 tokens raises, although 20 remain."""
    row = prefill(30, 10, cached=0)
    assert plan_one(ask([row], "none", 29)).error == 2
    assert sizes(ask([row], "none", 30)) == [20]


def test_adapters_are_sorted_and_last_chunks_go_last():
    rows = [prefill(4, lora_id=5), prefill(4), prefill(4, lora_id=3)]
    assert plan_one(ask(rows, FCFS, NONE)).order == [1, 2, 0]
    answer = plan_one(ask([prefill(15, reuse=8)] * 3, FCFS, 20, 1))
    assert answer.num_scheduled_tokens == [15, 15, 6]
    assert answer.order == [2, 0, 1]
