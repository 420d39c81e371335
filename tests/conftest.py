"""Eight CPU devices for every test, strict types, full precision in products, one compile cache."""

import os
import signal
from pathlib import Path

import jax
import pytest

# Compiling is what tests wait for, here and in the processes that they start. Without XLA's fusion
# emitters it takes half as long; they place fused multiply-adds differently in each program, and
# AVX has none, so that what is equal on paper stays equal in bits. Splitting a program into parts
# that are compiled side by side costs an eighth more, and two workers have no core left for it.
# JAX 0.11 has no other way to compile than these emitters, and XLA ends a process that is given a
# flag it does not know.
_FASTER = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
_FASTER = _FASTER if jax.__version_info__ < (0, 11) else ""
# SSE4_2 or AVX2 round differently: every test has to pass with them too.
ISA = os.environ.get("FEDJAX_PFL_TEST_ISA", "AVX")
os.environ["XLA_FLAGS"] = f"{_FASTER}--xla_cpu_max_isa={ISA}"
# What is compiled is kept, small programs too, for the other processes of a session, those that
# tests start, and later sessions: a program read from there is the same machine code.
CACHE = Path(__file__).parents[1] / ".cache" / f"jax-{jax.__version__}-{ISA}"
LARGEST = 1_000_000_000  # bytes of it, after which it begins anew
MANY = 20_000  # memory maps, after which compiled programs are let go between two files
KEPT = {
    "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(CACHE),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # One that is just being written, or was when its process was killed, is compiled again.
    "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache entry",
}
os.environ.update(KEPT)
jax.config.update("jax_compilation_cache_dir", KEPT["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# What a shell starts in the background has Ctrl-C ignored, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


# About longest first; most other files take less than ten CPU seconds each.
LONG = (
    "contract_test",
    "planted_test",
    "notebooks_test",
    "sweep_test",
    "stress_test",
    "multiprocess_test",
    "resume_test",
    "export_test",
    "tuning_test",
    "runner_test",
    "checkpoints_test",
    "page_test",
    "own_contract_test",
    "fedmn_test",
)
ALONE = ("notebooks_test",)  # whose tests have nothing in common


def pytest_sessionstart(session: pytest.Session) -> None:
    """Empties the cache if it is large. The folder stays: another session may be using it."""
    if "PYTEST_XDIST_WORKER" in os.environ or not CACHE.is_dir():
        return
    entries = list(CACHE.iterdir())
    if sum(path.stat().st_size for path in entries) > LARGEST:
        for path in entries:
            path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("clients",), (jax.sharding.AxisType.Auto,))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In several processes, a file's tests stay together, and an algorithm's in the contract's:
    what one of them has compiled serves the others. What takes long begins first.
    """
    for item in items:
        algorithm = getattr(item, "callspec", None) and item.callspec.params.get("name")
        group = f"{item.path.stem}-{algorithm}" if item.path.stem == "contract_test" else item.path
        if slow := item.get_closest_marker("slow"):
            assert slow.args, f"{item.nodeid} does not say why it is slow"
            group = item.nodeid if item.path.stem in ALONE else group
        item.add_marker(pytest.mark.xdist_group(str(group)))
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Let programs go when there are many: each takes some of the 65,530 memory maps that a process
    may have, and XLA crashes when there are no more. Where there is room, what one file has
    compiled serves the next, and nothing is collected.
    """
    apart = (lambda test: test.path) if "PYTEST_XDIST_WORKER" not in os.environ else _group
    if nextitem is not None and apart(item) != apart(nextitem) and _memory_maps() > MANY:
        jax.clear_caches()


def _memory_maps() -> int:
    maps = Path("/proc/self/maps")  # where there is no such file, there is no such limit either
    return maps.read_text().count("\n") if maps.exists() else 0


def _group(item: pytest.Item) -> str:
    return str(next(item.iter_markers("xdist_group")).args[0])
