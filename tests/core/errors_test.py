"""The check that factories make of their numbers."""

import jax
import jax.numpy as jnp
import pytest

from fedjax_pfl.core.errors import UsageError, require


def test_what_is_needed_is_raised_in_a_line():
    for holds in (True, jnp.float32(0.5) > 0):
        require(holds, "rate is 0.5")
    for fails in (False, jnp.float32(-1) > 0):
        with pytest.raises(UsageError, match="rate is -1"):
            require(fails, "rate is -1")


def test_what_is_traced_has_been_checked_before():
    def rate(x):
        require((x > 0) & (x <= 1), f"rate is {x}")
        return x

    assert jax.jit(rate)(-1.0) == -1
