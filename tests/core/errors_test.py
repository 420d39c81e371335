"""Checks of settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core.errors import UsageError, require, require_count
from tests.commands import message


def test_require_raises_if_false():
    for holds in (True, jnp.float32(0.5) > 0):
        require(holds, "rate is 0.5")
    for fails in (False, jnp.float32(-1) > 0):
        with pytest.raises(UsageError, match="rate is -1"):
            require(fails, "rate is -1")


def test_require_passes_traced_conditions():
    def rate(x):
        require((x > 0) & (x <= 1), f"rate is {x}")
        return x

    assert jax.jit(rate)(-1.0) == -1


def test_a_count_is_an_integer_and_no_bool():
    for value in (None, 1, np.int32(3)):
        require_count("epochs", value)
    for value in (True, 0, 2.0, "1"):
        line = message(require_count, "epochs", value)
        assert line == f"epochs is {value!r}; it must be an integer, at least 1"
