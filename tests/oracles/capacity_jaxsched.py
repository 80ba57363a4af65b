"""Admission under the `jaxsched` rules, walked request by request.

Rows are walked by rank: the more urgent first, among equals those that have started,
then transfers, then queue order. Where nobody can be preempted, all that have started
come first. A row that does not fit in this pass keeps what it has unless a row of
higher rank needs it.
"""

from oracles import capacity_records as rec
from oracles.capacity_records import (
    Answer,
    blocks_for_step,
    blocks_to_completion,
    cross_blocks,
    needs,
    pools,
)

_ALIVE = ("encode", "prefill", "decode", "decode_to_complete", "disagg_decode_init")


def admit(case):
    """The `Answer` of one pass."""
    reason = [_standing(case, request) for request in case.requests]
    ranked = sorted(
        range(len(case.requests)), key=lambda row: _rank(case, case.requests[row], row)
    )
    walk = _Walk(case, reason, ranked)
    if case.policy == "max_requests":
        walk.take_by_count()
    elif case.policy == "max_utilization":
        walk.take_with_preemption()
    else:
        walk.take_with_reservation()
    return Answer(walk.admitted, walk.preempted, reason)


def holdings(request):
    """What pausing the request gives back: blocks of all its beams, cross, slots."""
    return [
        *(blocks * request.beam_width for blocks in request.allocated_blocks),
        request.allocated_cross_blocks,
        request.allocated_state_slots,
    ]


def has_started(request):
    """Whether the request holds anything or is past its first chunk."""
    return request.phase in _ALIVE and (request.started or any(holdings(request)))


def _rank(case, request, row):
    waits = not has_started(request)
    urgency = (-request.priority, waits, request.phase != "disagg_decode_init", row)
    return urgency if case.policy == "max_utilization" else (waits, *urgency)


def _standing(case, request):
    if request.phase == "empty":
        return rec.EMPTY_ROW
    if request.phase not in _ALIVE:
        return rec.WRONG_PHASE
    if case.policy != "max_requests" and never_fits(case, request):
        return rec.TOO_LARGE
    return rec.HELD if request.held else None


def required(case, request):
    """What the request needs of empty pools, in the order of `needs`."""
    completion = case.policy != "max_utilization"
    held = holdings(request)
    if has_started(request) and not completion:
        want = wants(case, request, completion)
        return [n + h for n, h in zip(want, held, strict=True)]
    count = len(case.windows)
    if completion:
        blocks = [
            blocks_to_completion(case, request, which, held=0, referenced=0)
            for which in range(count)
        ]
    else:
        blocks = [
            blocks_for_step(case, request, which, referenced=0)
            for which in range(count)
        ]
    cross = cross_blocks(case, request, completion)
    waits = not request.started and request.phase != "encode"
    return [*blocks, cross, request.new_state_slots if waits else 0]


def never_fits(case, request):
    """Whether empty pools, or an empty adapter pool, could not take the request."""
    completion = case.policy != "max_utilization"
    if completion and has_started(request):
        return False  # it has been admitted: its reservation stands
    cross = 0 if case.total_cross_blocks is None else case.total_cross_blocks
    total = [*case.total_blocks, cross, case.total_state_slots]
    if any(n > t for n, t in zip(required(case, request), total, strict=True)):
        return True
    if request.lora_id is None or case.lora_pages is None:
        return False
    return request.lora_pages > case.lora_pages


def wants(case, request, completion):
    """What the request still needs, less what it holds where `needs` forgets that."""
    want = needs(case, request, completion)
    whole_prompt = request.at_first_chunk or request.phase == "disagg_decode_init"
    if not completion and whole_prompt:
        want = [n - h for n, h in zip(want, holdings(request), strict=True)]
    return [max(0, n) for n in want]


class _Walk:
    """One pass: what is left of everything, and who got in."""

    def __init__(self, case, reason, ranked):
        self.case, self.reason = case, reason
        self.rows = [row for row in ranked if reason[row] is None]
        self.ranked = ranked
        self.free = pools(case)
        self.pages = case.lora_pages
        self.claimed = set()
        self.admitted, self.preempted = [], []
        self.keys = {
            (r.new_block_key, r.lora_id)
            for r in case.requests
            if r.phase == "prefill"
            and not r.at_first_chunk
            and r.new_block_key is not None
        }

    def request(self, row):
        return self.case.requests[row]

    def full(self):
        return len(self.admitted) >= self.case.max_num_requests

    def pages_needed(self, row):
        request = self.request(row)
        if self.pages is None or request.lora_id is None:
            return 0
        return 0 if request.lora_id in self.claimed else request.lora_pages

    def lacks_pages(self, row):
        return self.pages_needed(row) > max(0, self.pages or 0)

    def claim(self, row):
        if self.pages is not None:
            self.pages -= self.pages_needed(row)
            if self.request(row).lora_id is not None:
                self.claimed.add(self.request(row).lora_id)

    def defers(self, row):
        request, case = self.request(row), self.case
        if not case.prefix_deferral or len(case.windows) > 1:
            return False
        if not request.at_first_chunk or has_started(request):
            return False
        if request.new_block_key is None:
            return False
        return (request.new_block_key, request.lora_id) in self.keys

    def take(self, row, want):
        request = self.request(row)
        self.claim(row)
        self.free = [f - n for f, n in zip(self.free, want, strict=True)]
        self.admitted.append(row)
        self.reason[row] = rec.ADMITTED
        if request.at_first_chunk and request.new_block_key is not None:
            self.keys.add((request.new_block_key, request.lora_id))

    def close(self, rows, why):
        for row in rows:
            if self.reason[row] is None:
                self.reason[row] = why

    def room(self, want, extra=None):
        extra = extra or [0] * len(want)
        return all(n <= f + e for n, f, e in zip(want, self.free, extra, strict=True))

    def take_by_count(self):
        for row in self.rows:
            if self.full():
                break
            self.take(row, [0] * len(self.free))
        self.close(self.rows, rec.BATCH_FULL)

    def take_with_reservation(self):
        case = self.case
        started = [row for row in self.ranked if has_started(self.request(row))]
        for row in started:
            want = wants(case, self.request(row), True)
            if self.reason[row] is None and not self.full():
                self.take(row, want)
            else:  # it does not run in this pass, but its reservation stands
                self.free = [f - n for f, n in zip(self.free, want, strict=True)]
                self.claim(row)
                self.close([row], rec.BATCH_FULL)
        if case.policy == "static_batch" and started:
            self.close(self.rows, rec.STATIC_BATCH)
            return
        for row in self.rows:
            if self.reason[row] is not None:
                continue
            if self.lacks_pages(row):
                self.reason[row] = rec.NO_LORA_PAGES
            elif self.defers(row):
                self.reason[row] = rec.PREFIX_DEFERRED
            elif self.full():
                self.close(self.rows, rec.BATCH_FULL)
            elif not self.room(wants(case, self.request(row), True)):
                self.reason[row] = rec.NO_BLOCKS
                self.close(self.rows, rec.BEHIND_BLOCKED)
            else:
                self.take(row, wants(case, self.request(row), True))

    def take_with_preemption(self):
        case, holders = self.case, []
        for row in self.rows:
            request = self.request(row)
            if has_started(request) and not request.in_flight:
                holders.append(row)
        stopped = len(self.rows)
        for at, row in enumerate(self.rows):
            want = wants(case, self.request(row), False)
            if self.lacks_pages(row):
                self.reason[row] = rec.NO_LORA_PAGES
                continue
            if self.defers(row):
                self.reason[row] = rec.PREFIX_DEFERRED
                continue
            behind = [r for r in holders if r in self.rows[at + 1 :]]
            victims = self.victims(want, behind)
            # Nobody gets in behind a row that was preempted for those before it.
            ended = any(row in self.rows[: at + 1] for row in self.preempted)
            if self.full() or victims is None or ended:
                stopped = at
                break
            for victim in victims:
                holders.remove(victim)
                self.preempted.append(victim)
                given = holdings(self.request(victim))
                self.free = [f + g for f, g in zip(self.free, given, strict=True)]
            self.take(row, want)
        for row in self.preempted:
            self.reason[row] = rec.PREEMPTED
        self.coast(self.rows[stopped:])

    def victims(self, want, candidates):
        """Those to pause, from the last, until `want` fits; None if it never does."""
        chosen, extra = [], [0] * len(want)
        while not self.room(want, extra):
            if not candidates:
                return None
            chosen.append(candidates.pop())
            given = holdings(self.request(chosen[-1]))
            extra = [e + g for e, g in zip(extra, given, strict=True)]
        return chosen

    def coast(self, rows):
        """Started rows behind the stop go on while they fit; nobody is paused."""
        if self.full():
            self.close(rows, rec.BATCH_FULL)
            return
        self.close(rows[:1], rec.NO_BLOCKS)
        stopped = None
        for row in rows[1:]:
            if self.reason[row] is not None:
                continue
            want = wants(self.case, self.request(row), False)
            if not has_started(self.request(row)):
                self.reason[row] = rec.BEHIND_BLOCKED
            elif stopped is not None:
                self.reason[row] = stopped
            elif self.lacks_pages(row):
                self.reason[row] = rec.NO_LORA_PAGES
            elif self.full():
                self.reason[row] = stopped = rec.BATCH_FULL
            elif self.room(want):
                self.take(row, want)
            else:
                self.reason[row] = stopped = rec.NO_BLOCKS
