"""Random admission cases in the format of the `plan` command.

Tight pools on purpose: most cases end in a refusal, a preemption or a deferral.
"""

POLICIES = ("max_requests", "guaranteed_no_evict", "static_batch", "max_utilization")
_PHASES = ("prefill", "prefill", "chunk", "decode", "decode", "decode", "last", "done")
_PHASES += ("transfer", "encode", "empty-handed chunk")


def random_case(rng, rules, rich=True):
    """One case; `rich` adds what the stored answers do not cover.

    That is: prefix deferral and reuse, encoder inputs and their pool, state slots,
    holds, requests in flight, priorities and pools without a limit.
    """
    block = rng.choice((1, 2, 4, 16))
    windows = [_window(rng, block) for _ in range(rng.choice((1, 1, 1, 2)))]
    pools = {
        "policy": rng.choice(POLICIES + POLICIES[1:2] + POLICIES[3:] * 2),
        "max_num_requests": rng.choice((1, 2, 3, 5, 16, 16)),
        "block_size": block,
        "windows": windows,
        "two_step_lookahead": rng.random() < 0.3,
    }
    if rng.random() < 0.4:
        pools["lora_pages"] = rng.randrange(0, 25)
    if rich:
        _enrich_pools(rng, pools)
    pages = [rng.randrange(0, 12) for _ in range(4)]
    requests = [
        _request(rng, at, pools, pages, rich) for at in range(rng.randrange(0, 12))
    ]
    return {"rules": rules, "capacity": pools, "requests": requests}


def _window(rng, block):
    tokens = rng.choice((1, 5, 16, 33, 64, 1_000_000))
    free = rng.choice((60, 160, 320))
    return {"window": tokens, "free_blocks": rng.randrange(0, free) // block}


def _enrich_pools(rng, pools):
    pools["prefix_deferral"] = rng.random() < 0.7
    if rng.random() < 0.7:
        pools["free_cross_blocks"] = rng.randrange(0, 12)
    if rng.random() < 0.4:
        pools["free_state_slots"] = rng.randrange(0, 5)
    for window in pools["windows"]:
        if rng.random() < 0.1:
            window["free_blocks"] = None
        elif rng.random() < 0.2:
            window["total_blocks"] = window["free_blocks"] + rng.randrange(0, 20)
        if rng.random() < 0.1:
            window["window"] = None


def _request(rng, at, pools, pages, rich):
    kind = rng.choice(_PHASES if rich else _PHASES[:9])
    prompt, new = rng.randrange(1, 60), rng.randrange(1, 40)
    request = {"id": at, "num_prompt_tokens": prompt, "max_new_tokens": new}
    request["phase"] = {
        "chunk": "prefill",
        "empty-handed chunk": "prefill",
        "last": "decode_to_complete",
        "done": "finished",
        "transfer": "disagg_decode_init",
    }.get(kind, kind)
    if kind in ("decode", "last", "done"):
        request["num_output_tokens"] = rng.randrange(0, new + 1)
    if kind.endswith("chunk") and prompt > 1:
        request["num_computed_tokens"] = rng.randrange(1, prompt)
    if kind in ("decode", "last", "chunk"):
        request["allocated_blocks"] = _held(request, pools)
    if rng.random() < 0.2:
        request["beam_width"] = rng.choice((2, 4))
    if rng.random() < 0.3:
        request["num_draft_tokens"] = rng.randrange(1, 6)
    if "lora_pages" in pools and rng.random() < 0.6:
        adapter = rng.randrange(0, 3)
        request |= {"lora_id": adapter, "lora_pages": pages[adapter]}
    if rich:
        _enrich(rng, request, pools)
    return request


def _held(request, pools):
    tokens = request["num_prompt_tokens"] + request.get("num_output_tokens", 0)
    size = pools["block_size"]
    return [
        -(-min(tokens, window["window"] or tokens) // size)
        for window in pools["windows"]
    ]


def _enrich(rng, request, pools):
    if rng.random() < 0.3:
        request["priority"] = rng.randrange(-1, 3)
    if rng.random() < 0.1:
        request["in_flight"] = True
    if rng.random() < 0.08:
        request["hold_reason"] = rng.choice(("held", "waiting_for_encoder"))
    if request["phase"] != "finished" and rng.random() < 0.5:
        request["num_encoder_tokens"] = rng.randrange(0, 30)
    if "free_state_slots" in pools:
        holds = "allocated_blocks" in request
        request["allocated_state_slots" if holds else "new_state_slots"] = 1
    if request["phase"] != "prefill":
        return
    if rng.random() < 0.7:
        request["new_block_key"] = rng.randrange(0, 3)
    if rng.random() < 0.3:
        request["num_referenced_blocks"] = rng.randrange(0, 5)
    computed = request.get("num_computed_tokens", 0)
    if computed and rng.random() < 0.4:
        request["num_cached_tokens"] = computed
    if rng.random() < 0.1:
        request.setdefault("allocated_blocks", _held(request, pools))
