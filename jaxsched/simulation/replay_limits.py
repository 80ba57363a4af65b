"""Refuses a replay whose counts or times would not fit, before it runs."""

import numpy as np

from jaxsched.core.config import MAX_COUNT
from jaxsched.simulation.replay_arrays import ArrivalTimes
from jaxsched.simulation.replay_clock import MAX_STEP_PS
from jaxsched.simulation.replay_config import ReplayConfig, ReplayError
from jaxsched.simulation.workloads import Workload

_MAX_CLOCK_PS = 2**64 - 2**62
_PS_PER_DAY = 86_400 * 10**12


def check_ranges(
    workload: Workload,
    config: ReplayConfig,
    times: ArrivalTimes,
    entering: np.ndarray,
) -> None:
    """Checks what a step may read and take, and when the last one may end.

    The bounds are safe and rough: each step schedules at least one token, and a row
    reads at most the whole request.

    Raises:
      ReplayError: naming what to change.
    """
    requests = [workload.requests[index] for index in entering]
    if not requests:
        return
    drafts = config.draft_tokens
    longest = sorted(
        (r.num_prompt_tokens + r.max_new_tokens + drafts + 1 for r in requests),
        reverse=True,
    )
    together = sum(longest[: config.max_num_seqs])
    if together > MAX_COUNT:
        raise ReplayError(
            f"{workload.name}: max_num_seqs={config.max_num_seqs} requests may hold "
            f"{together} tokens at once, more than {MAX_COUNT}: lower max_num_seqs"
        )
    tokens = min(config.max_num_batched_tokens or together, together)
    step = config.base_ps + config.token_ps * tokens + config.context_ps * together
    if step > MAX_STEP_PS:
        raise ReplayError(
            f"{workload.name}: a step may take {step / 10**12:.0f} s, more than "
            f"{MAX_STEP_PS / 10**12:.0f} s: lower step_ms, token_us or context_ns"
        )
    patience = max((waits or 0 for waits in times.patience), default=0)
    last = max(times.arrival) + patience
    for length in longest:
        row = config.token_ps * (1 + drafts) + config.context_ps * length
        last += length * (config.base_ps + row)
        if last > _MAX_CLOCK_PS:
            raise ReplayError(
                f"{workload.name}: the run may last more than "
                f"{_MAX_CLOCK_PS / _PS_PER_DAY:.0f} days: limit the requests, or raise "
                "rate_scale"
            )
