"""Invariant: each difference of the `jaxsched` rules is one, and does what it claims.

Every test runs both rule sets on one table, shows the defect under `tensorrt_llm` and
its absence under `jaxsched`. Both answers are held against the oracles.
"""

import pytest

from generators import decode, encode, prefill
from oracles import records
from oracles.records import NO_ID, SCHEDULED, TOO_LARGE, UNLIMITED
from planner_harness import ask, chunk_ends, plan_one, trace

FORCE, FCFS, EQUAL = "force_chunk", "first_come_first_served", "equal_progress"
CHUNKED = (FORCE, FCFS, EQUAL)


def both(rows, policy, tokens, unit=1, **limits):
    """Answers of the published and of the own rules to one table."""
    return [
        plan_one(ask(rows, policy, tokens, unit, rules, **limits))
        for rules in ("tensorrt_llm", "jaxsched")
    ]


@pytest.mark.parametrize("policy", CHUNKED)
def test_the_end_is_aligned_not_the_length(policy):
    """Cursor 5, unit 16, 50 tokens: 48 tokens end at 53, 43 end at 48."""
    rows = [prefill(200, 5, cached=0, points=[64, 128])]
    published, own = both(rows, policy, 50, 16)
    assert published.num_scheduled_tokens == [48]
    assert own.num_scheduled_tokens == [43]


def test_an_unaligned_start_does_not_drift():
    """After a hit at 5 the published ends stay 5 off the blocks up to the point."""
    start = prefill(200, 5, cached=5)
    ends = {
        rules: chunk_ends(ask([start], FORCE, 32, 16, rules))[0]
        for rules in ("tensorrt_llm", "jaxsched")
    }
    assert {end % 16 for end in ends["tensorrt_llm"][:-1]} == {5}
    assert {end % 16 for end in ends["jaxsched"][:-1]} == {0}


@pytest.mark.parametrize("policy", CHUNKED)
def test_a_budget_below_the_unit_makes_progress(policy):
    rows = [prefill(100), decode()]
    published, own = both(rows, policy, 11, 32, context=UNLIMITED)
    assert published.num_scheduled_tokens == [0, 1]
    assert own.num_scheduled_tokens == [10, 1]


def test_a_context_limit_below_the_unit_is_no_error():
    published, own = both([prefill(100)], FORCE, 64, 32, context=20)
    assert published.error == records.CONTEXT_BELOW_UNIT
    assert published.reason == [records.PLAN_ERROR]
    assert own.num_scheduled_tokens == [20]


@pytest.mark.parametrize("policy", CHUNKED)
def test_a_prefill_that_gets_nothing_takes_no_seat(policy):
    """Two seats, 10 tokens, unit 10: the second prompt's seat goes to the decode."""
    published, own = both([prefill(20), prefill(20), decode()], policy, 11, 10, seqs=2)
    assert published.num_scheduled_tokens == [10, 0, 0]
    assert own.num_scheduled_tokens == [10, 0, 1]


@pytest.mark.parametrize("policy", ["none", *CHUNKED])
def test_running_decodes_are_seated_before_prompts(policy):
    published, own = both([prefill(4), prefill(4), decode()], policy, 20, seqs=2)
    assert published.num_scheduled_tokens == [4, 4, 0]
    assert own.num_scheduled_tokens == [4, 0, 1]


@pytest.mark.parametrize("policy", [FCFS, EQUAL])
def test_every_policy_honours_the_points(policy):
    published, own = both([prefill(100, interval=64)], policy, 200, 32)
    assert published.num_scheduled_tokens == [100]
    assert own.num_scheduled_tokens == [64]
    assert (published.snapshot_point, own.snapshot_point) == ([NO_ID], [64])


@pytest.mark.parametrize("policy", CHUNKED)
def test_emitting_needs_fewer_steps_for_the_same_points(policy):
    """Interval 64, P=300, no limit: five chunks that are cut, two that emit."""
    row = prefill(300, interval=64)
    cut, filed = chunk_ends(ask([row], policy, UNLIMITED, 32, "jaxsched"))
    case = ask([row], policy, UNLIMITED, 32, "jaxsched", mode="emit", emit=2)
    assert (cut, filed) == ([64, 128, 192, 256, 300], [64, 128, 192, 256])
    # Two inner points, then the third is the end of the chunk.
    assert chunk_ends(case) == ([192, 300], [192])
    assert plan_one(case).emit_points == [[64, 128]]
    short = ask(
        [prefill(150, interval=64)], policy, 150, 32, "jaxsched", mode="emit", emit=2
    )
    assert plan_one(short).num_scheduled_tokens == [150]


@pytest.mark.parametrize("policy", [FCFS, EQUAL])
def test_drafts_are_fitted_even_where_everything_fits(policy):
    """Prompt 5, unit 5: three drafts would need another block."""
    published, own = both([prefill(5, drafts=3)], policy, 20, 5)
    assert published.num_draft_tokens == [3]
    assert own.num_draft_tokens == [0]


def test_the_free_part_of_the_last_block_is_measured_from_the_end():
    """Cursor 3, P=10, unit 4: the last block has 2 places; the length 7 suggests 1."""
    published, own = both([prefill(10, 3, cached=0, drafts=4)], FORCE, 20, 4)
    assert published.num_draft_tokens == [1]
    assert own.num_draft_tokens == [2]


@pytest.mark.parametrize("policy", [FORCE, FCFS])
def test_unfinished_prompts_carry_no_drafts(policy):
    published, own = both([prefill(100, drafts=3)], policy, 32, 16)
    assert published.num_draft_tokens == [3]
    assert own.num_draft_tokens == [0]


def test_kept_drafts_are_charged():
    """P=6, unit 8: both keep two drafts, only one of the totals says so."""
    published, own = both([prefill(6, drafts=5)], FORCE, 20, 8)
    assert published.num_draft_tokens == own.num_draft_tokens == [2]
    assert (published.num_batched_tokens, own.num_batched_tokens) == (6, 8)


def test_drafts_never_keep_a_decode_waiting():
    """1 + 9 drafts exceed 8 tokens at every step: the published rules hang."""
    rows = [decode(drafts=9, max_new_tokens=99), decode(max_new_tokens=99)]
    for _, answer in trace(ask(rows, "none", 8), 3):
        assert answer.num_seqs == 0
    published, own = both(rows, "none", 8)
    assert published.reason == [records.NO_BUDGET, records.BEHIND_BLOCKED]
    assert own.num_draft_tokens == [7, 0]
    assert own.reason == [SCHEDULED, records.NO_BUDGET]


def test_a_beam_that_never_fits_is_passed_over():
    rows = [decode(beam=9), decode(), prefill(4)]
    published, own = both(rows, FORCE, 8)
    assert published.num_seqs == 0
    assert own.reason == [TOO_LARGE, SCHEDULED, SCHEDULED]


def test_another_beam_width_does_not_end_the_walk():
    """The wide decode would not fit, but it could not join the batch anyway."""
    rows = [decode(), decode(beam=2), decode()]
    published, own = both(rows, "none", 2)
    assert published.num_scheduled_tokens == [1, 0, 0]
    assert own.num_scheduled_tokens == [1, 0, 1]
    assert own.reason == [SCHEDULED, records.BEAM_WIDTH, SCHEDULED]


@pytest.mark.parametrize("policy", ["none", *CHUNKED])
def test_one_row_that_is_too_large_does_not_spoil_the_step(policy):
    published, own = both([encode(30), prefill(4), decode()], policy, 20)
    assert published.error == records.ABOVE_CONTEXT_LENGTH
    assert published.num_seqs == 0
    assert own.error == 0
    assert own.reason == [TOO_LARGE, SCHEDULED, SCHEDULED]


def test_what_remains_is_measured_without_chunking():
    """Prompt 30 at cursor 10 under 29 tokens: 20 remain, and they fit."""
    published, own = both([prefill(30, 10, cached=0)], "none", 29)
    assert published.error == records.ABOVE_CONTEXT_LENGTH
    assert own.num_scheduled_tokens == [20]


@pytest.mark.parametrize("prompt", [64, 571])
def test_a_full_hit_still_computes_one_token(prompt):
    """vLLM #17999, mlx-lm #1162: everything cached, one token is left to compute."""
    published, own = both([prefill(prompt, reuse=prompt)], FCFS, prompt, 1)
    assert published.num_batched_tokens == 0
    assert own.num_batched_tokens == 1


def test_a_full_hit_needs_budget():
    """The decode takes all there is; a prompt is not run at no charge beside it."""
    published, own = both([decode(beam=4), prefill(9, reuse=9)], FCFS, 4)
    assert published.num_scheduled_tokens == [4, 9]
    assert own.num_scheduled_tokens == [4, 0]
    assert own.reason == [SCHEDULED, records.NO_BUDGET]


def test_an_empty_encoder_input_is_not_a_row_of_zero_tokens():
    published, own = both([encode(0)], FORCE, 4)
    assert published.num_scheduled_tokens == [0]
    assert own.num_scheduled_tokens == [1]


def test_a_running_decode_is_not_made_to_wait_for_an_encoder_input():
    """An encoder input of the whole budget, queued first: the answer would stall."""
    published, own = both([encode(10), decode()], FORCE, 10)
    assert published.num_scheduled_tokens == [10, 0]
    assert own.num_scheduled_tokens == [0, 1]
    assert own.reason == [records.NO_BUDGET, SCHEDULED]


@pytest.mark.parametrize("policy", CHUNKED)
def test_the_published_rules_hang_where_the_own_finish(policy):
    """Whole runs under a unit above the budget: nothing, for ever, against an end."""
    rows = [prefill(50, interval=20), prefill(30)]
    case = ask(rows, policy, 8, 16, context=UNLIMITED)
    for _, answer in trace(case, 3):
        assert answer.num_seqs == 0
    case = ask(rows, policy, 8, 16, "jaxsched", context=UNLIMITED)
    *_, (last, answer) = trace(case, 40)
    assert answer.num_seqs == 0
    assert [row.phase for row in last.rows] == ["finished", "finished"]
