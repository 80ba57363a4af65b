"""A small hybrid model with generated weights: seconds to build, nothing to download.

For trying the engine, for tests and for replays with a real model; its answers mean
nothing, but they depend on every token before them.
"""

from jaxsched.models.config import (
    AttentionConfig,
    Layer,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    RotaryConfig,
)
from jaxsched.models.serving import ServedModel

TINY_NAME = "tiny"
_SEED = 0


def tiny_config() -> ModelConfig:
    """Three layers: Mamba-2, attention with a feed-forward, Mamba-2."""
    size, head_dim = 32, 16
    return ModelConfig(
        family="tiny",
        vocab_size=256,
        hidden_size=size,
        norm_eps=1e-5,
        layers=(
            Layer(mixer="mamba"),
            Layer(mixer="attention", feed_forward="mlp"),
            Layer(mixer="mamba"),
        ),
        mamba=MambaConfig(
            num_heads=4,
            head_dim=16,
            state_size=16,
            num_groups=1,
            conv_width=4,
            chunk_size=16,
        ),
        attention=AttentionConfig(
            num_heads=2,
            num_kv_heads=1,
            head_dim=head_dim,
            in_size=size,
            scale=head_dim**-0.5,
            rotary=RotaryConfig(dim=head_dim),
        ),
        mlp=MlpConfig(size=64),
    )


def tiny_model(seed: int = _SEED, *, dtype: str = "float32") -> ServedModel:
    """The model; the same seed gives the same weights everywhere."""
    return ServedModel.random(tiny_config(), seed, dtype=dtype)
