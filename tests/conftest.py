"""Eight CPU devices for every test, strict types, full precision in products."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)  # compiling is what tests wait for
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="session")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("clients",), (jax.sharding.AxisType.Auto,))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In several processes, a file's tests stay together, and an algorithm's in the contract's:
    what one of them has compiled serves the others.
    """
    for item in items:
        algorithm = getattr(item, "callspec", None) and item.callspec.params.get("name")
        group = f"{item.path.stem}-{algorithm}" if item.path.stem == "contract_test" else item.path
        item.add_marker(pytest.mark.xdist_group(str(group)))
