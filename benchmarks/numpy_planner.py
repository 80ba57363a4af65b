"""The `jaxsched` rules of a whole step in vectorised NumPy: a baseline to be beaten.

No loop over requests: running sums up to the first row that does not fit, a first fit
in rounds behind it, binary search for EQUAL_PROGRESS. Cut mode, decoder-only. A test
holds it against the plain-Python oracle, so that the baseline is an honest one.
"""

import numpy as np

from jaxsched.core.config import MAX_COUNT, NO_ID, UNLIMITED, Phase, Reason

PREFILL, DECODE = int(Phase.PREFILL), int(Phase.DECODE)


def plan(requests: dict, limits: dict, policy: str, group_by_lora: bool) -> dict:
    """Plans one step.

    Args:
      requests: NumPy arrays by `RequestTable` field name.
      limits: integers by `Budget` field name.
      policy: a `ChunkingPolicy` name other than `none`.
      group_by_lora: whether the order groups rows by adapter.

    Returns:
      NumPy arrays by `Plan` field name (emitted points and preemption left out).
    """
    phase, position = requests["phase"], requests["num_computed_tokens"]
    prompt = requests["num_prompt_tokens"]
    remaining = np.maximum(prompt - position, 0)
    reason = _standing_reason(requests, remaining)
    free = reason == Reason.SCHEDULED

    budget, seats = int(limits["max_num_batched_tokens"]), int(limits["max_num_seqs"])
    size, drafts = np.zeros_like(phase), np.zeros_like(phase)
    decodes = free & (phase == DECODE)
    used, rows = _take_decodes(requests, decodes, budget, seats, size, drafts, reason)
    capacity = budget if budget == UNLIMITED else budget - used
    prefills = free & (phase == PREFILL)
    charged = _take_chunks(
        requests, limits, policy, prefills, remaining, capacity, seats - rows,
        size, drafts, reason,
    )  # fmt: skip

    taken = size > 0
    reason[taken] = Reason.SCHEDULED
    end = position + size
    last = prefills & taken & (end == prompt)
    on_point = prefills & taken & _is_point(requests, end)
    group = np.where(decodes, 3, np.where(last, 2, 1))
    return {
        "num_scheduled_tokens": size,
        "num_draft_tokens": drafts,
        "is_last_chunk": last,
        "snapshot_point": np.where(on_point, end, NO_ID),
        "prefill_mask": prefills & taken,
        "decode_mask": decodes & taken,
        "order": _order(taken, group, requests["lora_id"], group_by_lora),
        "reason": reason,
        "num_seqs": int(taken.sum()),
        "num_batched_tokens": min(used + charged, MAX_COUNT + 1),
    }


def _standing_reason(requests: dict, remaining: np.ndarray) -> np.ndarray:
    phase = requests["phase"]
    runs = (phase == DECODE) | ((phase == PREFILL) & (remaining > 0))
    held = np.where(requests["in_flight"], Reason.IN_FLIGHT, requests["hold_reason"])
    reason = np.where(runs, held, Reason.WRONG_PHASE)
    return np.where(phase == Phase.EMPTY, Reason.EMPTY_ROW, reason)


def _take_decodes(requests, decodes, budget, seats, size, drafts, reason):
    beam = requests["beam_width"]
    kept = np.clip(budget - beam.astype(np.int64), 0, requests["num_draft_tokens"])
    fits = decodes & (beam <= budget)
    reason[decodes & ~fits] = Reason.TOO_LARGE
    at = np.flatnonzero(fits)
    if at.size == 0:
        return 0, 0
    other = at[beam[at] != beam[at[0]]]
    reason[other] = Reason.BEAM_WIDTH
    at = at[beam[at] == beam[at[0]]]
    tokens = beam[at] + kept[at]
    total = np.cumsum(tokens)
    fit = (
        total.size
        if budget == UNLIMITED
        else int(np.searchsorted(total, budget, "right"))
    )
    count = min(fit, seats)
    size[at[:count]] = beam[at[:count]]
    drafts[at[:count]] = kept[at[:count]]
    if count == seats:
        reason[at[count:]] = Reason.BATCH_FULL
    elif count < at.size:
        reason[at[count]] = Reason.NO_BUDGET
        reason[at[count + 1 :]] = Reason.BEHIND_BLOCKED
    return int(total[count - 1]) if count else 0, count


def _take_chunks(
    requests, limits, policy, prefills, remaining, capacity, seats, size, drafts, reason
):
    at = np.flatnonzero(prefills)
    if at.size == 0:
        return 0
    position = requests["num_computed_tokens"][at].astype(np.int64)
    prompt = requests["num_prompt_tokens"][at].astype(np.int64)
    rest = remaining[at].astype(np.int64)
    first = position == requests["num_cached_tokens"][at]
    reuse = np.where(
        first, np.clip(requests["num_reusable_tokens"][at], 0, rest - 1), 0
    )
    computed = rest - reuse
    want = np.minimum(_next_point(requests, at), prompt) - position
    charge = want if policy == "force_chunk" else np.minimum(want, computed)
    unit, longest = int(limits["chunk_unit_size"]), int(limits["max_context_length"])
    below = min(capacity, longest) < unit
    if policy == "equal_progress" and not below:
        given = _equal_progress(position, want, charge, unit, longest, capacity, seats)
    else:
        given = _in_order(
            position, want, charge, 1 if below else unit, longest, capacity
        )
    before = np.cumsum(given > 0) - (given > 0)
    full = before >= seats
    given[full] = 0

    last = (given > 0) & (position + given == prompt)
    space = np.maximum(np.minimum(-prompt % unit, longest - given), 0)
    wanted = np.where(last, np.minimum(requests["num_draft_tokens"][at], space), 0)
    charged = int(np.minimum(given, computed).sum())
    if capacity != UNLIMITED:
        left = max(capacity - charged, 0)
        total = np.cumsum(wanted)
        wanted = np.minimum(total, left) - np.minimum(total - wanted, left)
    size[at], drafts[at] = given, wanted
    spent = int(np.minimum(given, charge).sum())
    out = capacity != UNLIMITED and capacity - spent <= 0
    why = np.where(
        full, Reason.BATCH_FULL, Reason.NO_BUDGET if out else Reason.BELOW_UNIT
    )
    reason[at] = Reason.TOO_LARGE if longest < 1 else why
    return charged + int(wanted.sum())


def _next_point(requests: dict, at: np.ndarray) -> np.ndarray:
    position = requests["num_computed_tokens"][at].astype(np.int64)
    prompt = requests["num_prompt_tokens"][at].astype(np.int64)
    interval = requests["snapshot_interval"][at].astype(np.int64)
    step = np.maximum(interval, 1)
    periodic = position // step * step + interval
    periodic = np.where((interval > 0) & (periodic <= prompt), periodic, UNLIMITED)
    points = requests["snapshot_points"][at]
    usable = (points > position[:, None]) & (points <= prompt[:, None])
    explicit = np.where(usable, points, UNLIMITED).min(axis=1, initial=UNLIMITED)
    return np.minimum(periodic, explicit)


def _is_point(requests: dict, end: np.ndarray) -> np.ndarray:
    interval = requests["snapshot_interval"]
    periodic = (interval > 0) & (end % np.maximum(interval, 1) == 0)
    explicit = (requests["snapshot_points"] == end[:, None]).any(axis=1)
    return (periodic | explicit) & (end <= requests["num_prompt_tokens"]) & (end > 0)


def _to_boundary(position, room, unit):
    reach = position + np.minimum(room, MAX_COUNT)
    return np.maximum(reach // unit * unit - position, 0)


def _in_order(position, want, charge, unit, longest, capacity):
    over = charge > longest
    limited = _to_boundary(position, longest, unit)
    full, cost = np.where(over, limited, want), np.where(over, limited, charge)
    if capacity == UNLIMITED:
        return full
    total = np.cumsum(cost)
    stop = int(np.searchsorted(total, capacity, "right"))
    if stop == full.size:
        return full
    given = np.where(np.arange(full.size) < stop, full, 0)
    left = capacity - int(total[stop] - cost[stop])
    given[stop] = _to_boundary(position[stop], left, unit)
    distance = unit - position % unit
    realign = np.where((distance < unit) & (distance < cost), distance, 0)
    granted = _first_fit(cost, realign, stop + 1, left - int(given[stop]))
    return np.where((granted == cost) & (granted > 0), full, np.maximum(given, granted))


def _first_fit(offer, fallback, start, left):
    """Row after row what fits, in one round per bit of what is left."""
    granted = np.zeros_like(offer)
    while left > 0 and start < offer.size:
        half = 1 << (left.bit_length() - 1)
        ahead, back = offer[start:], fallback[start:]
        sure = np.where(ahead < half, ahead, np.where(back < half, back, 0))
        total = np.cumsum(sure)
        before = left - (total - sure)
        fits = (ahead <= before) | ((back >= half) & (back <= before))
        event = (total > left - half) | ((ahead >= half) & fits)
        event &= ahead > 0
        stop = int(event.argmax()) if event.any() else ahead.size
        granted[start : start + stop] = sure[:stop]
        if stop == ahead.size:
            break
        rest = int(before[stop])
        options = (int(ahead[stop]), int(back[stop]))
        amount = next((option for option in options if option <= rest), 0)
        granted[start + stop] = amount
        left, start = rest - amount, start + stop + 1
    return granted


def _equal_progress(position, want, charge, unit, longest, capacity, seats):
    limit = np.where(want > longest, _to_boundary(position, longest, unit), want)
    cost, offset = np.minimum(limit, charge), position % unit
    offer = np.clip(unit - offset, 0, cost)
    took = (
        _in_order(
            np.zeros_like(offer), offer, offer, MAX_COUNT + 1, UNLIMITED, capacity
        )
        > 0
    )
    took &= np.cumsum(took) - took < seats
    limit, cost, offset = (np.where(took, part, 0) for part in (limit, cost, offset))

    def held(rounds, most):
        return np.clip(rounds * unit - offset, 0, most)

    if capacity == UNLIMITED or cost.sum() < capacity:
        return limit
    low, high = 1, max(int((cost + offset).max() + unit - 1) // unit, 1)
    while low < high:
        middle = (low + high) // 2
        enough = held(middle, cost).sum() >= capacity
        low, high = (low, middle) if enough else (middle + 1, high)
    if held(low, cost).sum() == capacity:
        return held(low, limit)
    return _past_refusal(held, cost, limit, low - 1, capacity)


def _past_refusal(held, cost, limit, done, capacity):
    now, after, beyond = (held(done + more, cost) for more in range(3))
    left = capacity - int(now.sum())
    this_offer, next_offer = after - now, beyond - after
    total = np.cumsum(this_offer)
    refused = int(np.searchsorted(total, left, "right"))
    left -= int(total[refused] - this_offer[refused])
    behind, ahead = np.s_[:refused], np.s_[refused + 1 :]
    none = np.zeros_like(cost)
    rounds = np.zeros_like(cost)
    rounds[behind] = 1
    granted = _first_fit(this_offer, none, refused + 1, left)
    rounds[ahead] = granted[ahead] == this_offer[ahead]
    left -= int(granted.sum())
    grows = np.zeros(cost.size, bool)
    if left > 0:
        granted = _first_fit(next_offer[behind], none[behind], 0, left)
        grows[behind] = granted == next_offer[behind]
        grows[ahead] = rounds[ahead] > 0
        left -= int(granted.sum())
    rounds = rounds + grows
    return np.where(grows & (left > 0), limit, held(done + rounds, limit))


def _order(taken, group, lora_id, group_by_lora):
    at = np.flatnonzero(taken)
    keys = (lora_id[at], group[at]) if group_by_lora else (group[at],)
    order = np.full(taken.size, NO_ID, np.int32)
    order[: at.size] = at[np.lexsort(keys)]
    return order
