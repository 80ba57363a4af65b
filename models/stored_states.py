"""States of a served sequence in the form that transformers keeps them in."""

import numpy as np

from jaxsched.models.config import ModelConfig
from jaxsched.models.driver import Driver


def published_states(driver: Driver, sequence: int, slot: int) -> dict[str, np.ndarray]:
    """States and keys of a sequence, named and shaped as in a dynamic cache.

    Args:
      driver: where the sequence has run; its last step was its prompt's last.
      sequence: which one.
      slot: its running slot, which then holds the state without a tail.

    Returns:
      `layers.I.conv_state.0` [channels, K-1], oldest column first (transformers keeps
      one older column, which nothing reads), `layers.I.recurrent_state.0` [H, P, N],
      `layers.I.key` and `layers.I.value` [kv heads, T, D].
    """
    config = driver.model.config
    state, found = driver.state(slot), {}
    position = driver.position(sequence)
    for index, layer in enumerate(config.mamba_layers):
        rows = _as_convolved(config, driver, layer, state["conv"][index], position)
        found[f"layers.{layer}.conv_state.0"] = rows.T
        found[f"layers.{layer}.recurrent_state.0"] = state["ssm"][index]
    keys, values = driver.keys_and_values(sequence)
    for index, layer in enumerate(config.attention_layers):
        found[f"layers.{layer}.key"] = keys[index].swapaxes(0, 1)
        found[f"layers.{layer}.value"] = values[index].swapaxes(0, 1)
    return found


def _as_convolved(
    config: ModelConfig, driver: Driver, layer: int, raw: np.ndarray, position: int
) -> np.ndarray:
    """Raw rows with bias and multipliers, as the convolution sees them."""
    mamba = config.mamba
    rows = raw * mamba.in_multiplier
    bias = driver.model.parameter(f"layers.{layer}.mamba.in_proj.bias")
    if bias is not None:
        begin = mamba.inner_size
        rows = rows + bias[None, begin : begin + mamba.conv_channels]
    states = mamba.num_groups * mamba.state_size
    _, by_x, by_keys, by_queries, _ = mamba.multipliers
    scale = np.repeat(
        np.array([by_x, by_keys, by_queries], np.float32),
        [mamba.inner_size, states, states],
    )
    places = position + np.arange(-len(rows), 0)
    return np.where(places[:, None] >= 0, rows * scale[None], 0.0)
