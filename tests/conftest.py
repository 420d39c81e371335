"""Two CPU devices for every test, strict types, full precision in products."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)  # compiling is what tests wait for
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="session")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("clients",), (jax.sharding.AxisType.Auto,))
