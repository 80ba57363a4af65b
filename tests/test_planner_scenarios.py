"""Invariant: situations that broke other engines get the right plan here.

Each test is a public bug report or request, reduced to its numbers. The reports are
named by engine and number; where a report gave no complete numbers, they are built
from its root cause. Every plan is held against the oracle as well.
"""

import pytest

import jaxsched
from generators import decode, encode, prefill
from oracles.records import (
    BEHIND_BLOCKED,
    NO_BUDGET,
    UNLIMITED,
    Row,
)
from planner_checks import charged
from planner_harness import (
    ask,
    assert_same_plans,
    chunk_ends,
    plan_one,
    run_cases,
    sizes,
    stack_budgets,
    stack_tables,
    trace,
)

CHUNKED = ("force_chunk", "first_come_first_served", "equal_progress")
BOTH = pytest.mark.parametrize("rules", ["tensorrt_llm", "jaxsched"])


@pytest.mark.parametrize(
    ("prompt", "points"),
    [(150, [64, 128, 150]), (128, [64, 106, 128]), (32, [10, 32])],
)
def test_points_from_interval_start_and_end(prompt, points):
    """TensorRT-LLM #16598: periodic 64 and offsets from both ends."""
    listed = jaxsched.list_snapshot_points(
        prompt, interval=64, from_start=[128, 999], from_end=[0, 22, 999]
    )
    assert listed == points


def test_publishing_overwrites_the_points_of_the_last_pass():
    """TensorRT-LLM #16598: with caching off the stale list must go, too."""
    table = jaxsched.request_table(
        [{"num_prompt_tokens": 64, "snapshot_interval": 8, "snapshot_points": [63]}],
        num_points=8,
    )
    rules = jaxsched.snapshot_rules(interval=64, enable_prefix_caching=False)
    off = jaxsched.publish(table, rules)
    assert off.snapshot_interval.tolist() == [0]
    assert set(off.snapshot_points.ravel().tolist()) == {-1}
    rules = jaxsched.snapshot_rules(from_start=[32])
    assert 63 not in jaxsched.publish(table, rules).snapshot_points.ravel().tolist()


@pytest.mark.parametrize(
    ("prompt", "points"),
    [(700, [256, 512]), (100, []), (256, [256]), (512, [256, 512])],
)
def test_periodic_points_include_the_prompt_end(prompt, points):
    """TensorRT-LLM's short-convolution manager: interval 256."""
    assert jaxsched.list_snapshot_points(prompt, interval=256) == points
    assert jaxsched.list_snapshot_points(prompt, interval=0) == []


def test_a_lone_branch_point_does_not_cost_the_prompt_end():
    """TensorRT-LLM #18272: the end is published on request, beside the branch."""
    listed = jaxsched.list_snapshot_points(1000, requested=[608], from_end=[0])
    assert listed == [608, 1000]
    case = ask([prefill(1000, points=listed)], "force_chunk", UNLIMITED, 32)
    assert chunk_ends(case) == ([608, 1000], [608, 1000])


@BOTH
@pytest.mark.parametrize(
    ("prompt", "start", "ends"),
    [
        (300, 0, [128, 256, 300]),
        (400, 200, [256, 384, 400]),
        (100, 0, [100]),
        (128, 0, [128]),
    ],
)
def test_chunks_end_on_the_interval(rules, prompt, start, ends):
    """sglang-jax #1408: interval 128; an exact multiple is one last chunk."""
    row = prefill(prompt, start, interval=128)
    case = ask([row], "force_chunk", UNLIMITED, 128, rules)
    assert chunk_ends(case) == (ends, [end for end in ends if end % 128 == 0])
    assert plan_one(case).is_last_chunk == [len(ends) == 1]


@BOTH
def test_a_tight_budget_ends_inside_the_interval_and_files_nothing(rules):
    """sglang-jax #1408: W=64, P=300, interval 128."""
    answer = plan_one(ask([prefill(300, interval=128)], "force_chunk", 64, 64, rules))
    assert answer.num_scheduled_tokens == [64]
    assert answer.snapshot_point == [-1]
    assert answer.is_last_chunk == [False]


def test_a_boundary_nearer_than_a_unit_is_reached():
    """TensorRT-LLM #19366: points 64, 128, 150, unit 32, cursor 128, 24 tokens left."""
    row = prefill(150, 128, points=[64, 128, 150])
    assert sizes(ask([row], "force_chunk", 24, 32, "jaxsched")) == [22]
    unlimited = ask([row], "force_chunk", 24, 32, "tensorrt_llm", context=UNLIMITED)
    assert sizes(unlimited) == [22]


@BOTH
def test_what_a_cut_row_leaves_goes_to_the_next(rules):
    """100 tokens, distances 64, 64, 4: a running sum of wishes gives 0 last."""
    rows = [prefill(200, points=[64]), prefill(200, points=[64]), prefill(4)]
    assert sizes(ask(rows, "force_chunk", 100, 32, rules)) == [64, 32, 4]


def crowd(rules):
    """40 running decodes and one prompt: 24 of 64 tokens left, unit 32."""
    running = [decode(max_new_tokens=1000) for _ in range(40)]
    return ask([prefill(300, interval=64), *running], "force_chunk", 64, 32, rules)


def test_a_budget_below_the_unit_makes_progress():
    """Decodes leave 24 tokens a step for as long as they run, the unit is 32."""
    ends = [24, 48, 64, 88, 112, 128, 152, 176, 192, 216, 240, 256, 280, 300]
    assert chunk_ends(crowd("jaxsched")) == (ends, [64, 128, 192, 256])


def test_the_published_rules_wait_for_ever_below_the_unit():
    for _, answer in trace(crowd("tensorrt_llm"), 5):
        assert answer.num_scheduled_tokens[0] == 0
        assert answer.num_seqs == 40


def test_a_budget_limited_run_still_stands_on_every_point():
    """P=1000, interval 256, unit 32, 100 tokens a step."""
    case = ask([prefill(1000, interval=256)], "force_chunk", 100, 32, "jaxsched")
    ends = [96, 192, 256, 352, 448, 512, 608, 704, 768, 864, 960, 1000]
    assert chunk_ends(case) == (ends, [256, 512, 768])


def test_points_are_reached_whatever_the_chunk_length():
    """SGLang #30938: chunks of 16 under an interval of 128."""
    case = ask([prefill(256, interval=128)], "force_chunk", 16, 16, "jaxsched")
    ends, filed = chunk_ends(case)
    assert ends == [16 * step for step in range(1, 17)]
    assert filed == [128, 256]


@pytest.mark.parametrize("policy", CHUNKED)
def test_a_cap_inside_a_block_is_not_rounded_to_nothing(policy):
    """vLLM #51582: block 100, cursor 500, a cap of 10 tokens, then room again."""
    row = prefill(5000, 500, cached=0)
    assert sizes(ask([row], policy, 10, 100, "jaxsched")) == [10]
    row = prefill(5000, 510, cached=0)
    assert sizes(ask([row], policy, 100, 100, "jaxsched")) == [90]


def test_a_unit_above_the_budget_is_refused_with_the_number():
    """vLLM #34445 and #36734: block 2096 under 2048 tokens hung with health green."""
    with pytest.raises(ValueError, match=r"2096.*2048"):
        jaxsched.budget(max_num_batched_tokens=2048, chunk_unit_size=2096)


@pytest.mark.parametrize("policy", CHUNKED)
def test_a_unit_above_the_budget_can_be_allowed_and_ends(policy):
    """The same, allowed: sub-unit chunks, snapshots at 2096 and 4192 alone."""
    case = ask([prefill(5000, interval=2096)], policy, 2048, 2096, "jaxsched")
    ends = [2048, 2096, 4144, 4192, 5000]
    assert chunk_ends(case) == (ends, [2096, 4192])


@BOTH
def test_the_rest_after_a_hit_is_one_chunk(rules):
    """sglang-jax #1355: prefix 4352 of 8192, so 3840, and never a row of length 0."""
    hit = prefill(8192, 4352)
    done = Row(phase="prefill", num_prompt_tokens=64, num_computed_tokens=64, id=1)
    answer = plan_one(ask([hit, done], "force_chunk", 8192, 64, rules))
    assert answer.num_scheduled_tokens == [3840, 0]
    assert answer.prefill_mask == [True, False]


@BOTH
def test_drafts_of_decodes_are_paid_before_prefills(rules):
    """TensorRT-LLM #16101: 100 decodes with 3 drafts leave 7792 of 8192 tokens."""
    rows = [prefill(10_000), *(decode(drafts=3) for _ in range(100))]
    case = ask(rows, "force_chunk", 8192, 16, rules)
    answer = plan_one(case)
    assert answer.num_scheduled_tokens[0] == 7792
    assert answer.num_batched_tokens == charged(case, answer) == 8192


def test_each_rank_of_a_batch_has_its_own_budget():
    """sglang-jax #1328: four ranks, P=16384, chunk 2048; one rank starved the rest."""
    ranks = [ask([prefill(16384)], "force_chunk", 2048, 64, "jaxsched")] * 4
    assert_same_plans(ranks)
    assert run_cases(ranks).num_scheduled_tokens[:, 0].tolist() == [2048] * 4


@pytest.mark.parametrize("policy", CHUNKED)
def test_the_longest_huge_prompt_ends(policy):
    """Counts near the largest that int32 sums allow neither wrap nor stall."""
    longest = jaxsched.MAX_COUNT
    row = prefill(longest, interval=2**28)
    case = ask([row], policy, 2**28 + 5, 2**27, "jaxsched")
    ends, filed = chunk_ends(case)
    assert filed == [2**28, 2**29, 2**28 * 3]
    assert ends == [*filed, longest]


def waiting_encoder(step):
    """A large encoder input in front of a stream of short prompts."""
    stream = [prefill(2, max_new_tokens=3) for _ in range(step, 14)]
    return [decode(max_new_tokens=2), encode(10), *stream]


@pytest.mark.parametrize("policy", ["none", *CHUNKED])
def test_a_stream_of_prompts_does_not_starve_an_encoder_input(policy):
    """Prompts served ahead of it would become decodes and hold its budget for ever."""
    case = ask(waiting_encoder(0), policy, 10, 1, "jaxsched")
    answer = plan_one(case)
    assert answer.reason[1] == NO_BUDGET
    assert set(answer.reason[2:]) == {BEHIND_BLOCKED}
    started = [answer.encode_mask[1] for _, answer in trace(case, 4)]
    assert started.index(True) <= 2


def test_stacking_keeps_rows_and_budgets_together():
    """Guards the harness: the arrays hold what the cases say."""
    case = ask([prefill(7, 3, points=[5]), decode(beam=2)], "none", 9, 4)
    table, budget = stack_tables([case, case]), stack_budgets([case, case])
    assert table.num_prompt_tokens[1, :3].tolist() == [7, 4, 0]
    assert table.snapshot_points[0, 0, :2].tolist() == [5, -1]
    assert table.phase[0, :3].tolist() == [2, 3, 0]
    assert budget.max_num_batched_tokens.tolist() == [9, 9]
