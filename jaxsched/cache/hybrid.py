"""`HybridCache` in use: lookup, reserve, grow, commit, release, fork.

All are pure functions of fixed-shape tables, made to be called inside a jitted step
with the cache donated. One step of a serving loop:

    match = lookup(cache, prompts, config)               # A prompts of the queue
    cache, placed = reserve(cache, rows, prompts, match, target, now, config)
    ... copy_slots(states, placed.state_source, placed.state_target), zero_slots(...),
        copy blocks placed.block_source -> placed.block_target in the KV pages ...
    cache, grown = grow(cache, target, now, config)      # running rows, all R
    ... model step; the planner ends chunks on snapshot points ...
    cache, filed = commit(cache, step, now, config)      # see `commit`
    ... copy_slots(states, live_slot(row), filed.slot) ...
    cache = release(cache, rows, config)    # finished, cancelled, preempted rows

Rules that the callers keep: a match is used on the very cache that it was made on;
copies are carried out in the order of the calls; a row is released before it is used
again; nothing is committed that was not computed. Then the invariants 3 to 6 of the
design hold after every call, whatever the order: nothing is published before it is
computed, a preempted or cancelled row leaves only what it had committed, what a row
holds is never evicted, and a reservation is all or nothing.

Times are i32 milliseconds on a clock of the caller; recency uses a tick of its own.
"""

from jaxsched.cache.commit import Filed, Step, commit
from jaxsched.cache.hybrid_types import HybridCache, HybridConfig, empty_cache
from jaxsched.cache.prefix import Match, MissReason, Prompts, lookup, lookup_keys
from jaxsched.cache.reserving import Placed, reserve
from jaxsched.cache.running import fork, grow, release
from jaxsched.cache.states import SnapshotKind

__all__ = (
    "Filed",
    "HybridCache",
    "HybridConfig",
    "Match",
    "MissReason",
    "Placed",
    "Prompts",
    "SnapshotKind",
    "Step",
    "commit",
    "empty_cache",
    "fork",
    "grow",
    "lookup",
    "lookup_keys",
    "release",
    "reserve",
)
