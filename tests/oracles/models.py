"""Model layers token by token in float64: slow, obvious, and without jax."""

import math

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def convolve(rows, weight, bias):
    """Causal depthwise convolution and silu of one sequence from its start; [T, C]."""
    length, channels = rows.shape
    width = weight.shape[1]
    out = np.zeros((length, channels))
    for token in range(length):
        for tap in range(width):
            source = token - (width - 1) + tap
            if source >= 0:
                out[token] += weight[:, tap] * rows[source]
        if bias is not None:
            out[token] += bias
    return silu(out)


def recurrence(x, dt, rates, keys, queries, state):
    """One sequence: x [T, H, P], dt [T, H], keys, queries [T, G, N], state [H, P, N].

    Returns outputs [T, H, P] and the state after every token [T, H, P, N].
    """
    length, heads, _ = x.shape
    per_group = heads // keys.shape[1]
    state, outputs, states = state.astype(float), [], []
    for token in range(length):
        out = np.zeros(x.shape[1:])
        state = state.copy()
        for head in range(heads):
            group = head // per_group
            decay = math.exp(dt[token, head] * rates[head])
            added = np.outer(dt[token, head] * x[token, head], keys[token, group])
            state[head] = state[head] * decay + added
            out[head] = state[head] @ queries[token, group]
        outputs.append(out)
        states.append(state)
    return np.array(outputs), np.array(states)


def attention(query, keys, values, scale):
    """One query [heads, D] over keys and values [T, kv heads, D]."""
    heads, per_head = query.shape[0], query.shape[0] // keys.shape[1]
    out = np.zeros(query.shape)
    for head in range(heads):
        own = head // per_head
        scores = np.array([scale * query[head] @ key[own] for key in keys])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[head] = sum(
            w * value[own] for w, value in zip(weights, values, strict=True)
        )
    return out


def rotate(head, position, dim, theta, scaling):
    """One head [D] turned to its position."""
    out = head.astype(float).copy()
    for pair in range(dim // 2):
        angle = position / scaling / theta ** (2 * pair / dim)
        first, second = float(head[pair]), float(head[pair + dim // 2])
        out[pair] = first * math.cos(angle) - second * math.sin(angle)
        out[pair + dim // 2] = second * math.cos(angle) + first * math.sin(angle)
    return out


def route_softmax(logits, top_k):
    """Experts of one token and their weights: a softmax over the best logits."""
    best = sorted(range(len(logits)), key=lambda e: -logits[e])[:top_k]
    powers = [math.exp(logits[e] - logits[best[0]]) for e in best]
    return {e: power / sum(powers) for e, power in zip(best, powers, strict=True)}


def route_groups(logits, bias, top_k, num_groups, top_groups, normalise, scaling):
    """Experts of one token: sigmoid scores, biased choice within the best groups."""
    scores = [1 / (1 + math.exp(-value)) for value in logits]
    wishes = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(logits) // num_groups
    value = [
        sum(sorted(wishes[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)
    ]
    open_groups = sorted(range(num_groups), key=lambda g: -value[g])[:top_groups]
    reachable = [e for e in range(len(logits)) if e // size in open_groups]
    best = sorted(reachable, key=lambda e: -wishes[e])[:top_k]
    total = sum(scores[e] for e in best) + 1e-20 if normalise else 1.0
    return {e: scores[e] / total * scaling for e in best}


def gated_norm(y, z, weight, gate, groups, eps):
    """The norm behind the scan for one token, [inner]."""
    opened = silu(z)
    if gate == "gate_only":
        return y * opened
    if gate == "gate_then_norm":
        y = y * opened
    parts = []
    for part in np.split(y, groups):
        parts.append(part / math.sqrt(np.mean(part**2) + eps))
    y = np.concatenate(parts) * weight
    return y * opened if gate == "norm_then_gate" else y
