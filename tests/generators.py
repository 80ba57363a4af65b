"""Random and exhaustive planning cases, as `oracles.records.Case`.

Everything is drawn from a seed, so a failing table can be drawn again.
"""

import dataclasses
import itertools
import random

from oracles.records import (
    HELD,
    MAX_COUNT,
    NO_ID,
    NOT_ADMITTED,
    SCHEDULED,
    UNLIMITED,
    WAITING_FOR_ENCODER,
    Case,
    Row,
)

MAX_UNIT = 2**27
MAX_LORA_ID = 2**16 - 2
SAME = "same as the token budget"
POLICIES = (
    "none",
    "force_chunk",
    "first_come_first_served",
    "equal_progress",
)
CONFIGS = (
    *(("tensorrt_llm", policy, "cut", 8) for policy in POLICIES),
    *(("jaxsched", policy, "cut", 8) for policy in POLICIES),
    *(("jaxsched", policy, "emit", 2) for policy in POLICIES),
)
"""Rules, policy, snapshot mode and emitted points of the programs that are tested."""


def make_case(config, rows, **limits):
    """A case of one of `CONFIGS`; `limits` as in the case files' limits."""
    rules, policy, mode, emit = config
    return Case(
        rules=rules,
        chunking_policy=policy,
        snapshot_mode=mode,
        max_emit_points=emit,
        encoder_decoder=limits.pop("encoder_decoder", True),
        group_by_lora=limits.pop("group_by_lora", True),
        rows=rows,
        **limits,
    )


@dataclasses.dataclass(frozen=True)
class Scale:
    """Magnitudes of a random table; a chunk is at most about 64 units long."""

    longest: int
    units: tuple
    intervals: tuple
    drafts: int
    beams: tuple


SMALL = Scale(30, (1, 2, 3, 4, 5, 8), (0, 0, 1, 3, 4, 8), 6, (1, 1, 1, 2))
MEDIUM = Scale(2000, (32, 48, 64, 100), (0, 0, 64, 96, 250), 40, (1, 1, 1, 4))
HUGE = Scale(
    MAX_COUNT,
    (2**24, 2**25 - 1, 2**26 + 3, MAX_UNIT),
    (0, 0, 2**24, 2**27 + 5, MAX_COUNT),
    2**15,
    (1, 1, 7, 2**15),
)
SCALES = (SMALL, SMALL, MEDIUM, HUGE)


def random_cases(seed, count, config, max_rows, max_points, **fixed):
    """`count` random cases of one configuration."""
    draw = random.Random(f"{seed}/{config}")
    return [
        _random_case(draw, config, max_rows, max_points, dict(fixed))
        for _ in range(count)
    ]


def _random_case(draw, config, max_rows, max_points, fixed):
    scale = draw.choice(SCALES)
    size = draw.choice((1, 2, 3, draw.randint(1, max_rows), max_rows))
    plain = draw.random() < 0.3
    rows = [_random_row(draw, scale, i, max_points, plain) for i in range(size)]
    if draw.random() < 0.3:
        rows = [Row() if draw.random() < 0.2 else row for row in rows]
    budget = _random_limit(draw, scale, rows)
    context = draw.choice((budget, budget, UNLIMITED, _random_limit(draw, scale, rows)))
    return make_case(
        config,
        rows,
        max_num_seqs=draw.choice((1, 2, size, draw.randint(1, size + 1), 2**30 - 2)),
        max_num_batched_tokens=budget,
        max_context_length=context,
        chunk_unit_size=draw.choice(scale.units),
        **fixed,
    )


def _random_limit(draw, scale, rows):
    """A limit that binds now and then: near what the rows ask for, or far off."""
    total = sum(row.num_prompt_tokens for row in rows)
    most = min(MAX_COUNT, max(1, total))
    return draw.choice(
        (
            UNLIMITED,
            draw.randint(0, scale.units[-1]),
            draw.randint(0, 2),
            draw.randint(1, scale.longest),
            draw.randint(1, most),
            draw.randint(1, most),
            max(1, most - draw.randint(0, 5)),
        )
    )


def _random_row(draw, scale, index, max_points, plain):
    row = Row(
        id=index,
        phase=draw.choice(("prefill", "prefill", "prefill", "decode", "decode")),
        num_prompt_tokens=_random_length(draw, scale),
    )
    if draw.random() < 0.12:
        row.phase = draw.choice(
            ("encode", "decode_to_complete", "finished", "disagg_decode_init")
        )
    if row.phase == "prefill":
        _random_prefill(draw, scale, row, max_points)
    elif row.phase == "encode":
        row.num_encoder_tokens = draw.choice((0, _random_length(draw, scale)))
    else:
        most = MAX_COUNT - row.num_prompt_tokens
        row.num_output_tokens = draw.randint(0, draw.choice((min(9, most), most)))
        # A decode has computed its outputs but for the last one.
        row.num_computed_tokens = row.num_prompt_tokens + row.num_output_tokens
        row.num_computed_tokens -= draw.choice((0, min(row.num_output_tokens, 1)))
        row.beam_width = draw.choice(scale.beams)
    if plain:
        return row
    row.num_draft_tokens = draw.choice((0, 0, draw.randint(0, scale.drafts)))
    adapters = (NO_ID, NO_ID, draw.randint(0, 3), draw.randint(0, MAX_LORA_ID))
    row.lora_id = draw.choice(adapters)
    row.in_flight = draw.random() < 0.08
    row.hold_reason = draw.choice(
        (SCHEDULED,) * 20 + (HELD, NOT_ADMITTED, WAITING_FOR_ENCODER)
    )
    return row


def _random_length(draw, scale):
    return draw.choice(
        (
            draw.randint(1, scale.longest),
            draw.randint(1, scale.longest),
            draw.randint(1, max(1, scale.longest // 20)),
            scale.longest - draw.randint(0, 3),
        )
    )


def _random_prefill(draw, scale, row, max_points):
    prompt = row.num_prompt_tokens
    row.num_computed_tokens = draw.choice(
        (0, draw.randint(0, prompt - 1), draw.randint(0, prompt - 1), prompt - 1)
    )
    if draw.random() < 0.6:
        row.num_cached_tokens = row.num_computed_tokens
    row.num_reusable_tokens = draw.choice(
        (0, draw.randint(0, scale.longest), draw.randint(0, prompt))
    )
    row.num_output_tokens = draw.choice(
        (0, draw.randint(0, min(9, MAX_COUNT - prompt)))
    )
    row.snapshot_interval = draw.choice(scale.intervals)
    count = draw.choice((0, 0, 1, draw.randint(0, max_points)))
    points = [_random_point(draw, scale, row) for _ in range(count)]
    row.snapshot_points = points if draw.random() < 0.5 else sorted(set(points))


def _random_point(draw, scale, row):
    """Anywhere, absent, or near the cursor or the prompt's end."""
    near = row.num_computed_tokens + draw.randint(0, 3)
    end = row.num_prompt_tokens + draw.randint(-2, 2)
    anywhere = draw.randint(0, scale.longest)
    return max(NO_ID, min(MAX_COUNT, draw.choice((near, end, anywhere, NO_ID))))


def crowded_cases(seed, count, config, max_rows):
    """Many short prefills under a budget that ends somewhere in the middle of them.

    These are the tables in which the rows behind a cut one compete for what is left.
    """
    draw = random.Random(f"{seed}/{config}")
    cases = []
    for _ in range(count):
        unit = draw.choice((1, 2, 3, 4, 5, 8, 16))
        longest = unit * draw.choice((1, 2, 4, 9))
        rows = []
        for index in range(draw.randint(2, max_rows)):
            prompt = draw.randint(1, longest + 2)
            row = prefill(prompt, draw.choice((0, 0, draw.randint(0, prompt - 1))))
            row.id = index
            row.num_reusable_tokens = draw.choice((0, 0, draw.randint(0, longest)))
            row.snapshot_interval = draw.choice((0, 0, draw.randint(1, longest)))
            row.num_draft_tokens = draw.choice((0, draw.randint(0, unit + 1)))
            rows.append(row)
        total = sum(row.remaining for row in rows)
        budget = draw.randint(1, max(1, total))
        context = draw.choice((budget, UNLIMITED, draw.randint(1, longest + 2)))
        cases.append(
            make_case(
                config,
                rows,
                max_num_seqs=draw.choice((len(rows), draw.randint(1, len(rows)))),
                max_num_batched_tokens=budget,
                max_context_length=context,
                chunk_unit_size=unit,
            )
        )
    return cases


def prefill(prompt, computed=0, reuse=0, points=(), interval=0, drafts=0, **fields):
    """A prefill row at its first chunk."""
    return Row(
        phase="prefill",
        num_prompt_tokens=prompt,
        num_computed_tokens=computed,
        num_cached_tokens=fields.pop("cached", computed),
        num_reusable_tokens=reuse,
        snapshot_points=list(points),
        snapshot_interval=interval,
        num_draft_tokens=drafts,
        **fields,
    )


def decode(beam=1, drafts=0, **fields):
    """A decode row."""
    return Row(
        phase="decode",
        num_prompt_tokens=fields.pop("prompt", 4),
        num_computed_tokens=fields.pop("computed", 4),
        num_output_tokens=1,
        beam_width=beam,
        num_draft_tokens=drafts,
        **fields,
    )


def encode(tokens, prompt=4):
    """A row whose encoder input has not been run."""
    return Row(phase="encode", num_prompt_tokens=prompt, num_encoder_tokens=tokens)


def all_cases(config, choices, num_rows, limits):
    """Every table of `num_rows` rows out of `choices`, under every limit."""
    for rows in itertools.product(choices, repeat=num_rows):
        named = [dataclasses.replace(row, id=i) for i, row in enumerate(rows)]
        for limit in limits:
            yield make_case(config, named, **limit)


def all_limits(tokens, seqs, units, contexts):
    """Every combination of limits; `SAME` as context length repeats the budget."""
    return [
        {
            "max_num_batched_tokens": budget,
            "max_num_seqs": rows,
            "chunk_unit_size": unit,
            "max_context_length": budget if context == SAME else context,
        }
        for budget, rows, unit, context in itertools.product(
            tokens, seqs, units, contexts
        )
    ]
