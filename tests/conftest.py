"""Strict numerics for every test, and the shared-data fixtures."""

import gc
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

settings.register_profile("jaxsched", deadline=None, derandomize=True)
settings.load_profile("jaxsched")


@pytest.fixture(autouse=True, scope="module")
def quick_compilation(request):
    """Programs that run a few times are not worth optimising; integers stay exact.

    Tests of the models keep the optimiser: their promise is about bits of floats.
    """
    quick = not request.module.__name__.startswith("test_models")
    jax.config.update("jax_disable_most_optimizations", quick)
    yield quick
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_programs():
    """Every compiled program holds memory maps, and a process may have 65,530 of them.

    A worker that keeps the programs of all modules dies in the compiler near the end.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def optimized(quick_compilation):
    """The compiler as users have it, for tests that look at compiled programs."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", quick_compilation)
