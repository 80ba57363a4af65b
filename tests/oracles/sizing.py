"""Pools from memory, one block at a time and in exact fractions."""

from fractions import Fraction


def pools(budget, kv_bytes, state_bytes, block_size, live_slots, interval):
    """Blocks and snapshots of a budget: each block brings its share of snapshots.

    Blocks are added while they and their share fit; then whole snapshots while one
    more fits and the tokens that could have been held still call for it.
    """
    rest = budget - live_slots * state_bytes
    share = Fraction(state_bytes, interval) if interval else Fraction(0)
    each = block_size * (kv_bytes + share)
    blocks = 0
    while kv_bytes and (blocks + 1) * each <= rest:
        blocks += 1
    left = rest - blocks * block_size * kv_bytes
    tokens = 0
    if interval:
        tokens = int(rest / (kv_bytes + share))
    snapshots = 0
    while interval and (snapshots + 1) * state_bytes <= left:
        if snapshots * interval >= tokens:
            break
        snapshots += 1
    return blocks, snapshots
