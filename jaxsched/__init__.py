"""Snapshot-aware scheduling for hybrid (attention + recurrent) models under `jax.jit`.

Only the names listed in `__all__` are promised; the modules behind them are open to
read and may move.
"""

from jaxsched.core.config import (
    MAX_COUNT,
    NO_ID,
    UNLIMITED,
    ChunkingPolicy,
    Phase,
    PlanError,
    Reason,
    Rules,
    SchedulerConfig,
    SnapshotMode,
)
from jaxsched.core.plan import Budget, Plan
from jaxsched.core.requests import RequestTable

__all__ = (
    "MAX_COUNT",
    "NO_ID",
    "UNLIMITED",
    "Budget",
    "ChunkingPolicy",
    "Phase",
    "Plan",
    "PlanError",
    "Reason",
    "RequestTable",
    "Rules",
    "SchedulerConfig",
    "SnapshotMode",
)
