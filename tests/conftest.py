"""Strict numerics for every test, and the shared-data fixtures."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

settings.register_profile("jaxsched", deadline=None, derandomize=True)
settings.load_profile("jaxsched")
