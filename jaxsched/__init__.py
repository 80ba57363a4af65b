"""Snapshot-aware scheduling for hybrid (attention + recurrent) models under `jax.jit`.

Only the names exported here are promised; the modules behind them are open to
read and may move.
"""

from jaxsched.core.build import bucket_size, budget, request_table
from jaxsched.core.config import (
    MAX_COUNT,
    NO_ID,
    UNLIMITED,
    ChunkingPolicy,
    Phase,
    PlanError,
    Reason,
    RowWalk,
    Rules,
    SchedulerConfig,
    SnapshotMode,
)
from jaxsched.core.plan import Budget, Plan
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.chunking import chunk_sizes
from jaxsched.scheduling.packed import HostPlanner
from jaxsched.scheduling.rollout import RunResult, rollout, run_to_completion
from jaxsched.scheduling.scheduler import advance, schedule
from jaxsched.scheduling.snapshots import (
    SnapshotRules,
    is_snapshot_point,
    list_snapshot_points,
    next_snapshot_point,
    next_snapshot_points,
    publish,
    snapshot_rules,
)

__all__ = (
    "Budget",
    "ChunkingPolicy",
    "HostPlanner",
    "MAX_COUNT",
    "NO_ID",
    "Phase",
    "Plan",
    "PlanError",
    "Reason",
    "RequestTable",
    "RowWalk",
    "Rules",
    "RunResult",
    "SchedulerConfig",
    "SnapshotMode",
    "SnapshotRules",
    "UNLIMITED",
    "advance",
    "bucket_size",
    "budget",
    "chunk_sizes",
    "is_snapshot_point",
    "list_snapshot_points",
    "next_snapshot_point",
    "next_snapshot_points",
    "publish",
    "request_table",
    "rollout",
    "run_to_completion",
    "schedule",
    "snapshot_rules",
)
