"""Eight CPU devices for every test, strict types, full precision in products."""

import os
import signal

import jax
import pytest

# Compiling is what tests wait for, here and in the processes that they start. Without XLA's fusion
# emitters it takes half as long; they place fused multiply-adds differently in each program, and
# AVX has none, so that what is equal on paper stays equal in bits. JAX 0.11 has no other way to
# compile than these emitters, and XLA ends a process that is given a flag it does not know.
_EMITTERS = "--xla_cpu_use_fusion_emitters=false " if jax.__version_info__ < (0, 11) else ""
os.environ["XLA_FLAGS"] = f"{_EMITTERS}--xla_cpu_max_isa=AVX"
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# What a shell starts in the background has Ctrl-C ignored, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


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


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Let programs go that no further test needs: each takes some of the 65,530 memory maps that a
    process may have, and XLA crashes when there are no more.
    """
    apart = (lambda test: test.path) if "PYTEST_XDIST_WORKER" not in os.environ else _group
    if nextitem is None or apart(item) != apart(nextitem):
        jax.clear_caches()


def _group(item: pytest.Item) -> str:
    return str(next(item.iter_markers("xdist_group")).args[0])
