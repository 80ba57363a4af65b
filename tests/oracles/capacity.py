"""Admission, walked request by request: entry point and the `tensorrt_llm` rules."""

from oracles import capacity_jaxsched
from oracles import capacity_records as rec
from oracles.capacity_records import Answer, holdings, needs, pools


def admit(case):
    """The `Answer` of one pass under the rules and the policy of the case."""
    if case.rules == "jaxsched":
        return capacity_jaxsched.admit(case)
    walks = {
        "max_requests": _max_requests,
        "guaranteed_no_evict": _guaranteed_no_evict,
        "static_batch": _guaranteed_no_evict,
        "max_utilization": _max_utilization,
    }
    reason = [None] * len(case.requests)
    for row, request in enumerate(case.requests):
        if request.phase == "empty":
            reason[row] = rec.EMPTY_ROW
        elif request.phase == "finished":
            reason[row] = rec.WRONG_PHASE
        elif request.held:
            reason[row] = rec.HELD
        elif not _gated(case, request):
            reason[row] = rec.WRONG_PHASE
    answer = walks[case.policy](case, reason)
    if answer.error:
        standing = (rec.EMPTY_ROW, rec.HELD, rec.WRONG_PHASE)
        answer.admitted, answer.preempted = [], []
        reason = [r if r in standing else rec.REFUSED_STEP for r in reason]
        answer.reason = reason
    return answer


def _gated(case, request):
    phases = {"encode", "prefill", "decode", "decode_to_complete"}
    if case.policy != "max_requests":
        phases.add("disagg_decode_init")
    return request.phase in phases


class _Adapters:
    """Pages of adapters: claimed once each."""

    def __init__(self, case):
        self.limited = case.lora_pages is not None
        self.left = case.lora_pages
        self.claimed = set()

    def needs(self, request):
        if request.lora_id is None or request.lora_id in self.claimed:
            return 0
        return request.lora_pages

    def fits(self, request):
        return not self.limited or self.needs(request) <= self.left

    def claim(self, request):
        if self.limited:
            self.left -= self.needs(request)
        if request.lora_id is not None:
            self.claimed.add(request.lora_id)


def _block_key(request):
    return (request.new_block_key, request.lora_id)


def _seed_keys(case):
    """Keys of blocks that prefills past their first chunk are computing."""
    return {
        _block_key(request)
        for request in case.requests
        if request.phase == "prefill"
        and not request.held
        and not request.at_first_chunk
        and request.new_block_key is not None
    }


def _defers(case, request, keys):
    """Whether the request waits for its prefix; registers its own block if not."""
    if not case.prefix_deferral or len(case.windows) > 1:
        return False
    if not request.at_first_chunk or request.new_block_key is None:
        return False
    if _block_key(request) in keys:
        return True
    keys.add(_block_key(request))
    return False


def _open(reason):
    return [row for row, why in enumerate(reason) if why is None]


def _close(reason, why):
    return [why if r is None else r for r in reason]


def _max_requests(case, reason):
    admitted = _open(reason)[: case.max_num_requests]
    for row in admitted:
        reason[row] = rec.ADMITTED
    return Answer(admitted, [], _close(reason, rec.BATCH_FULL))


def _guaranteed_no_evict(case, reason):
    free, adapters = pools(case), _Adapters(case)
    running, transfers, others = [], [], []
    for row in _open(reason):
        request = case.requests[row]
        if len(running) >= case.max_num_requests:
            break
        if request.running:
            running.append(row)
            reason[row] = rec.ADMITTED
            free = [
                f - n for f, n in zip(free, needs(case, request, True), strict=True)
            ]
            adapters.claim(request)
        elif request.phase == "disagg_decode_init":
            transfers.append(row)
        else:
            others.append(row)
    if case.policy == "static_batch" and running:
        return Answer(running, [], _close(reason, rec.STATIC_BATCH))
    admitted, keys = list(running), _seed_keys(case)
    for rows in (transfers, others):
        stopped = None
        for row in rows:
            request = case.requests[row]
            if stopped is not None:
                reason[row] = stopped
                continue
            if request.phase == "encode" and case.free_cross_blocks is None:
                return Answer([], [], reason, rec.ENCODER_WITHOUT_CROSS_POOL)
            if case.policy != "static_batch" and _defers(case, request, keys):
                reason[row] = rec.PREFIX_DEFERRED
                continue
            if len(admitted) >= case.max_num_requests:
                reason[row] = stopped = rec.BATCH_FULL
                continue
            want = needs(case, request, True)
            short = any(n > f for n, f in zip(want, free, strict=True))
            if short and request.phase != "encode":
                reason[row], stopped = rec.NO_BLOCKS, rec.BEHIND_BLOCKED
                continue
            if not adapters.fits(request):
                reason[row] = rec.NO_LORA_PAGES
                continue
            admitted.append(row)
            reason[row] = rec.ADMITTED
            adapters.claim(request)
            if request.phase != "encode":
                free = [f - n for f, n in zip(free, want, strict=True)]
    return Answer(admitted, [], _close(reason, rec.BATCH_FULL))


def _max_utilization(case, reason):
    rows = _open(reason)
    free, adapters, keys = pools(case), _Adapters(case), _seed_keys(case)
    used = [0] * len(free)
    admitted, preempted = [], []
    at, end = 0, len(rows)
    while at < end:
        row = rows[at]
        request = case.requests[row]
        if request.phase == "encode" and case.free_cross_blocks is None:
            return Answer([], [], reason, rec.ENCODER_WITHOUT_CROSS_POOL)
        if _defers(case, request, keys):
            reason[row] = rec.PREFIX_DEFERRED
            at += 1
            continue
        want = needs(case, request, False)
        seated = len(admitted) < case.max_num_requests
        room = all(u + n <= f for u, n, f in zip(used, want, free, strict=True))
        if seated and room and adapters.fits(request):
            admitted.append(row)
            reason[row] = rec.ADMITTED
            used = [u + n for u, n in zip(used, want, strict=True)]
            adapters.claim(request)
            at += 1
            continue
        victims = [i for i in range(at, end) if case.requests[rows[i]].started]
        if not victims:
            reason[row] = rec.NO_BLOCKS if not room else rec.NO_LORA_PAGES
            if not seated:
                reason[row] = rec.BATCH_FULL
            break
        end = victims[-1]
        reason[rows[end]] = rec.PREEMPTED
        preempted.append(rows[end])
        given = holdings(case.requests[rows[end]])
        free = [f + g for f, g in zip(free, given, strict=True)]
    return Answer(admitted, preempted, _close(reason, rec.BEHIND_BLOCKED))
