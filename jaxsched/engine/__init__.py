"""Continuous batching over any model step: scheduler, hybrid cache and model in a loop.

`Engine` is the host's side, `steps` the two pure functions that it runs, `model` what
a model has to offer. Hybrid models get there by `jaxsched.models.engine_step`.
"""

from jaxsched.engine.config import EngineConfig
from jaxsched.engine.model import (
    Copies,
    ModelStep,
    RowWork,
    Sampling,
    StepResult,
    StepWork,
)
from jaxsched.engine.requests import Output, RequestRecord, SamplingParams
from jaxsched.engine.server import Engine, EngineStats

__all__ = (
    "Copies",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "ModelStep",
    "Output",
    "RequestRecord",
    "RowWork",
    "Sampling",
    "SamplingParams",
    "StepResult",
    "StepWork",
)
