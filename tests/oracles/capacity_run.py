"""A whole run under an admission policy: what is in at each iteration, until all end.

A small executor: admit, preempt, compute one chunk or one token, free what finished.
Tokens take blocks one by one; a first chunk takes the blocks of its whole prompt. The
token sampled last is not written yet: a sequence of s sampled tokens is shown to
admission as one of s - 1. A preempted request is computed again in one piece.
"""

import dataclasses

from oracles.capacity_records import Request, up


@dataclasses.dataclass
class Run:
    """What happened: ids that ran at each iteration, and prompts when they started."""

    ran: list
    starts: dict

    @property
    def num_iterations(self):
        return len(self.ran)

    def spans(self):
        """`(first, last, ids)` of iterations in which the same ids ran."""
        found = []
        for at, ids in enumerate(self.ran):
            if found and found[-1][2] == ids:
                found[-1] = (found[-1][0], at, ids)
            else:
                found.append((at, at, ids))
        return found


def request(name, prompt, new, **fields):
    """A request that has not started, with one attention window."""
    return Request(
        id=name,
        num_prompt_tokens=prompt,
        max_new_tokens=new,
        allocated_blocks=[0],
        **fields,
    )


def run(admit, pools, requests, arrivals=None, chunk=None):
    """Runs all requests to their end.

    Args:
      admit: from a case of the `plan` command to its answer.
      pools: the `capacity` of the case; `free_blocks` is the whole pool.
      requests: of `request`.
      arrivals: iteration -> how many of `requests` have arrived by then.
      chunk: most prompt tokens of one iteration, None: all.
    """
    total = pools["windows"][0]["free_blocks"]
    done, ran, starts, at, restarted = 0, [], {}, 0, set()
    here = list(requests[: arrivals[0]] if arrivals else requests)
    while here or done < len(requests):
        if arrivals and at in arrivals and at:
            here += requests[len(here) + done : arrivals[at]]
        answer = admit(_case(pools, here, total))
        names = {r.id: r for r in here}
        for name in answer["preempted"]:
            _restart(names[name])
            restarted.add(name)
        ids = []
        for name in answer["admitted"] + answer["disagg_decode_init"]:
            ids.append(name)
            starts.setdefault((name, names[name].num_prompt_tokens), at)
            piece = None if name in restarted else chunk
            _compute(names[name], pools["block_size"], piece)
        ended = [r for r in here if r.num_output_tokens >= r.max_new_tokens]
        here = [r for r in here if r not in ended]
        done += len(ended)
        ran.append(sorted(ids))
        at += 1
        if at > 2_000:
            raise RuntimeError(f"no end after {at} iterations; {here}")
    return Run(ran, starts)


def _case(pools, requests, total):
    used = sum(r.allocated_blocks[0] for r in requests)
    window = {**pools["windows"][0], "free_blocks": total - used}
    rows = []
    for one in requests:
        row = {key: value for key, value in vars(one).items() if value is not None}
        row["num_output_tokens"] = max(0, one.num_output_tokens - 1)
        rows.append(row)
    return {
        "rules": pools["rules"],
        "capacity": {
            **{key: value for key, value in pools.items() if key != "rules"},
            "windows": [window],
        },
        "requests": rows,
    }


def _restart(one):
    """The answer so far becomes prompt; everything is computed again."""
    one.num_prompt_tokens += one.num_output_tokens
    one.max_new_tokens -= one.num_output_tokens
    one.num_output_tokens = one.num_computed_tokens = 0
    one.allocated_blocks, one.phase = [0], "prefill"


def _compute(one, size, chunk):
    if one.phase == "disagg_decode_init":  # its prompt comes from elsewhere, whole
        one.phase, chunk = "prefill", None
    if one.phase == "prefill":
        left = one.num_prompt_tokens - one.num_computed_tokens
        one.num_computed_tokens += min(left, chunk or left)
        one.allocated_blocks = [up(one.num_prompt_tokens, size)]
        if one.num_computed_tokens < one.num_prompt_tokens:
            return
        one.phase = "decode"
    one.num_output_tokens += 1
    tokens = one.num_prompt_tokens + one.num_output_tokens
    one.allocated_blocks = [max(one.allocated_blocks[0], up(tokens - 1, size))]
