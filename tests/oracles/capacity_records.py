"""Plain records of one admission case, and the block arithmetic of one request.

No jax and no numpy here. Reading a case file gives a `Case`; each policy walks it.
"""

import dataclasses

from oracles.records import NO_ID, UNLIMITED

ADMITTED = 0
EMPTY_ROW = 1
WRONG_PHASE = 2
HELD = 3
BATCH_FULL = 4
NO_BLOCKS = 5
NO_LORA_PAGES = 6
BEHIND_BLOCKED = 7
PREFIX_DEFERRED = 8
STATIC_BATCH = 9
PREEMPTED = 10
TOO_LARGE = 11
REFUSED_STEP = 12

NAMES = (
    "admitted",
    "empty_row",
    "wrong_phase",
    "held",
    "batch_full",
    "no_blocks",
    "no_lora_pages",
    "behind_blocked",
    "prefix_deferred",
    "static_batch",
    "preempted",
    "too_large",
    "refused_step",
)

NO_ERROR = 0
ENCODER_WITHOUT_CROSS_POOL = 1


@dataclasses.dataclass
class Request:
    """One request, keys as in the case files; the default of each key is here."""

    id: object = NO_ID
    phase: str = "prefill"
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    max_new_tokens: int = 1
    num_draft_tokens: int = 0
    num_encoder_tokens: int = 0
    beam_width: int = 1
    lora_id: int | None = None
    lora_pages: int = 0
    priority: int = 0
    in_flight: bool = False
    hold_reason: str = "scheduled"
    allocated_blocks: list | None = None
    allocated_cross_blocks: int = 0
    allocated_state_slots: int = 0
    new_state_slots: int = 0
    num_referenced_blocks: int = 0
    new_block_key: int | None = None

    @property
    def held(self):
        return self.hold_reason != "scheduled"

    @property
    def at_first_chunk(self):
        return (
            self.phase == "prefill"
            and self.num_computed_tokens == self.num_cached_tokens
        )

    @property
    def running(self):
        return self.phase in ("decode", "decode_to_complete")

    @property
    def started(self):
        return self.running or (self.phase == "prefill" and not self.at_first_chunk)

    @property
    def num_tokens(self):
        return self.num_prompt_tokens + self.num_output_tokens


@dataclasses.dataclass
class Case:
    """Requests in queue order and the pools of one pass."""

    rules: str
    policy: str
    max_num_requests: int
    block_size: int
    windows: list
    free_blocks: list
    total_blocks: list
    two_step_lookahead: bool
    prefix_deferral: bool
    lora_pages: int | None
    free_cross_blocks: int | None
    total_cross_blocks: int | None
    free_state_slots: int
    total_state_slots: int
    requests: list


@dataclasses.dataclass
class Answer:
    """Row numbers in output order, and a reason for every row."""

    admitted: list
    preempted: list
    reason: list
    error: int = NO_ERROR


def read_case(case):
    """A `Case` from the `input` of a case file."""
    pools = case["capacity"]
    requests = [Request(**request) for request in case["requests"]]
    for request in requests:
        if request.allocated_blocks is None:
            request.allocated_blocks = [0] * len(pools["windows"])
    free = [
        UNLIMITED if window["free_blocks"] is None else window["free_blocks"]
        for window in pools["windows"]
    ]
    holds = [
        sum(r.allocated_blocks[w] * r.beam_width for r in requests)
        for w in range(len(free))
    ]
    total = [
        window.get("total_blocks", have if have == UNLIMITED else have + held)
        for window, have, held in zip(pools["windows"], free, holds, strict=True)
    ]
    cross = pools.get("free_cross_blocks")
    slots = pools.get("free_state_slots", UNLIMITED)
    return Case(
        rules=case["rules"],
        policy=pools["policy"],
        max_num_requests=pools["max_num_requests"],
        block_size=pools["block_size"],
        windows=[
            UNLIMITED if window["window"] is None else window["window"]
            for window in pools["windows"]
        ],
        free_blocks=free,
        total_blocks=total,
        two_step_lookahead=pools.get("two_step_lookahead", False),
        prefix_deferral=pools.get("prefix_deferral", False),
        lora_pages=pools.get("lora_pages"),
        free_cross_blocks=cross,
        total_cross_blocks=pools.get(
            "total_cross_blocks",
            None if cross is None else cross + _held(requests, "cross_blocks"),
        ),
        free_state_slots=slots,
        total_state_slots=pools.get(
            "total_state_slots",
            slots if slots == UNLIMITED else slots + _held(requests, "state_slots"),
        ),
        requests=requests,
    )


def _held(requests, what):
    return sum(getattr(request, "allocated_" + what) for request in requests)


def up(count, size):
    """`count / size`, rounded up."""
    return -(-count // size)


def blocks_to_completion(case, request, which, held=None, referenced=None):
    """Blocks of one window that the request will still take until its end."""
    size, window = case.block_size, case.windows[which]
    held = request.allocated_blocks[which] if held is None else held
    if request.phase == "encode":
        return 0
    prompt, beams = request.num_prompt_tokens, request.beam_width
    longest = prompt + request.max_new_tokens
    shared = min(prompt, window) // size
    total = up(min(longest, window), size)
    slides = longest > window
    grows = up(longest, size) > max(up(request.num_tokens, size), total)
    extra = 1 if slides and grows else 0
    generated = total - shared
    if len(case.windows) == 1 and request.at_first_chunk and held == 0:
        reused = request.num_referenced_blocks if referenced is None else referenced
        reused = min(reused, shared)
        shared, total = shared - reused, total - reused
    if held < shared:
        return shared - held + (generated + extra) * beams
    return (total - held + extra) * beams


def blocks_for_step(case, request, which, referenced=None):
    """Blocks of one window that the next step of the request will take."""
    size, window = case.block_size, case.windows[which]
    beams = request.beam_width
    if request.at_first_chunk or request.phase == "disagg_decode_init":
        tokens = min(
            request.num_prompt_tokens + request.num_draft_tokens,
            window + request.max_new_tokens,
        )
        blocks = tokens // size + (beams if tokens % size else 0)
        if len(case.windows) == 1 and request.at_first_chunk:
            reused = request.num_referenced_blocks if referenced is None else referenced
            blocks = max(0, blocks - reused)
        return blocks
    if not request.running:
        return 0
    steps = 2 if case.two_step_lookahead else 1
    added = min(
        steps * (request.num_draft_tokens + 1),
        request.max_new_tokens - request.num_output_tokens,
    )
    end = request.num_tokens + added
    if end > window:
        return 0
    return (up(end, size) - up(request.num_tokens, size)) * beams


def cross_blocks(case, request, to_completion):
    """Blocks of the cross-attention pool that the request will take."""
    if case.free_cross_blocks is None:
        return 0
    size = case.block_size
    if to_completion:
        at_start = request.phase == "prefill" and request.num_computed_tokens == 0
        return up(request.num_encoder_tokens, size) if at_start else 0
    if request.at_first_chunk or request.phase == "disagg_decode_init":
        tokens = request.num_encoder_tokens + request.num_draft_tokens
        beams = request.beam_width
        return tokens // size + (beams if tokens % size else 0)
    return 0


def needs(case, request, to_completion):
    """Blocks of every window, cross blocks and state slots, in this order."""
    blocks = [
        blocks_to_completion(case, request, which)
        if to_completion
        else blocks_for_step(case, request, which)
        for which in range(len(case.windows))
    ]
    cross = cross_blocks(case, request, to_completion)
    waits = not request.started and request.phase != "encode"
    return [*blocks, cross, request.new_state_slots if waits else 0]


def pools(case):
    """What is free, in the order of `needs`."""
    cross = 0 if case.free_cross_blocks is None else case.free_cross_blocks
    return [*case.free_blocks, cross, case.free_state_slots]


def holdings(request):
    """What pausing the request gives back, in the order of `needs`."""
    return [
        *request.allocated_blocks,
        request.allocated_cross_blocks,
        request.allocated_state_slots,
    ]


def reasons(case, answer):
    """Id and reason of every request that is not in, as the `plan` command says it."""
    return [
        {"id": request.id, "reason": NAMES[why]}
        for request, why in zip(case.requests, answer.reason, strict=True)
        if why != ADMITTED
    ]


def golden_form(case, answer):
    """The `expected` form of the case files: ids in output order, or an error."""
    if answer.error:
        return {"error": True}
    requests = case.requests
    waits = "disagg_decode_init"
    return {
        "admitted": [
            requests[r].id for r in answer.admitted if requests[r].phase != waits
        ],
        "disagg_decode_init": [
            requests[r].id for r in answer.admitted if requests[r].phase == waits
        ],
        "preempted": [requests[r].id for r in answer.preempted],
    }
