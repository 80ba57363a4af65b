"""A server in its steady state: time to first token and per output token, closed form.

So many users each send the next prompt as soon as the last answer has ended. This is
how public serving figures are measured; for queues and bursts use a replay.
"""

import dataclasses

import numpy as np

from jaxsched.simulation.costs import StepCosts, StepLoad, pairs_of_chunk, step_us


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingLoad:
    """Equal requests; numbers or arrays of one shape."""

    prompt_tokens: np.ndarray | float
    output_tokens: np.ndarray | float
    concurrency: np.ndarray | float  # users


def serving_times_us(
    costs: StepCosts,
    load: ServingLoad,
    *,
    max_chunk: int = 8192,
    computed_share: float = 1.0,
    burst_share: float = 0.0,
    first_us: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds to the first token and per output token.

    Prompts are computed in steps of their own between decode steps. While a request
    makes its answer, every other user's prompt comes once: so a decode step is
    followed by `concurrency / output_tokens` prompts on average.

    Args:
      costs: the model on its hardware.
      load: the requests.
      max_chunk: tokens of a prefill step.
      computed_share: part of the prompts that no prefix cache holds.
      burst_share: part of the other users' prompts that arrive together with one; it
        waits for half of them.
      first_us: whatever else passes before a first token: network, tokenizer.
    """
    prompt = np.asarray(load.prompt_tokens, np.float64)
    users = np.asarray(load.concurrency, np.float64)
    answer = np.asarray(load.output_tokens, np.float64)
    chunk = np.minimum(prompt, max_chunk)
    # All chunks of a prompt as equal ones: together they have its pairs.
    prefill = step_us(
        costs,
        StepLoad(
            prefill_tokens=chunk,
            token_pairs=pairs_of_chunk(0.0, prompt) * chunk / prompt,
            num_chunks=np.ones_like(chunk),
        ),
    )
    whole = prefill * (prompt / chunk) * computed_share
    context = users * (prompt + answer / 2)
    decode = step_us(costs, StepLoad(decode_rows=users, context_tokens=context))
    waiting = whole * burst_share * (users - 1) / 2 + decode / 2
    return first_us + whole + waiting, decode + whole * users / answer
