"""Settings of all tests: eight CPU devices, strict types, full precision, a compilation cache."""

import gc
import os
import re
import signal
import zlib
from pathlib import Path

import jax
import pytest

# Most of the time of the tests is compilation. It is twice as fast without XLA's fusion emitters,
# and an eighth faster without parallel code generation. Fused multiply-adds would differ between
# programs; AVX has none, so equal formulas have equal bits. JAX 0.11 always uses the emitters, and
# XLA ends a process with an unknown flag.
_FASTER = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
_FASTER = _FASTER if jax.__version_info__ < (0, 11) else ""
# Tests must also pass with AVX2, which rounds differently; .ci/run tries it in three folders.
ISA = os.environ.get("FEDJAX_PFL_TEST_ISA", "AVX")
os.environ["XLA_FLAGS"] = f"{_FASTER}--xla_cpu_max_isa={ISA}"
# XLA's threads. As many as devices are too few: two collective operations of a program that can run
# in any order wait for each other, and XLA ends the process after 40 seconds.
os.environ["NPROC"] = "16"
# All compiled programs are stored, for other processes and later sessions.
CACHE = Path(__file__).parents[1] / ".cache" / f"jax-{jax.__version__}-{ISA}"
MAX_CACHE_BYTES = 1_000_000_000  # a larger cache is deleted
MAX_MEMORY_MAPS = 20_000  # with more, compiled programs are deleted between two files
CACHE_SETTINGS = {
    "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(CACHE),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # An entry that is incomplete is compiled again.
    "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache entry",
}
os.environ.update(CACHE_SETTINGS)
jax.config.update("jax_compilation_cache_dir", CACHE_SETTINGS["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# Tracing makes many objects and few cycles, so that collecting cycles often takes a seventh of the
# time.
gc.set_threshold(50_000, 20, 20)

# A shell's background processes ignore Ctrl-C, and so would the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Longest first; most other files take less than ten CPU seconds each.
LONG = (
    "documents_commands_test",
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
    "network_contract_test",
    "fedmn_test",
)
UNGROUPED = ("documents_commands_test", "notebooks_test")  # tests that share no programs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        default="1/1",
        metavar="K/N",
        help="leaves out all slow tests but the K-th of N shares; files stay together",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Empties the cache if it is large. The folder stays: another session may be using it."""
    if "PYTEST_XDIST_WORKER" in os.environ or not CACHE.is_dir():
        return
    entries = list(CACHE.iterdir())
    if sum(path.stat().st_size for path in entries) > MAX_CACHE_BYTES:
        for path in entries:
            path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("clients",), (jax.sharding.AxisType.Auto,))


def share(text: str) -> tuple[int, int]:
    """Returns K and N of an option K/N."""
    numbers = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    k, n = map(int, numbers.groups()) if numbers else (1, 0)
    if k > n:
        raise pytest.UsageError(
            f"--share={text} is no share; give 1/3, 2/3 or 3/3 of the slow tests"
        )
    return k, n


def is_in_share(group: str, k: int, n: int) -> bool:
    """Returns True for a group of tests in the K-th of N shares, on every machine."""
    return zlib.adler32(group.encode()) % n == k - 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups tests that share programs, for several processes, and starts the longest first."""
    k, n = share(config.getoption("share"))
    selected, left_out = [], []
    for item in items:
        algorithm = getattr(item, "callspec", None) and item.callspec.params.get("name")
        file = item.nodeid.partition("::")[0]
        group = f"{item.path.stem}-{algorithm}" if item.path.stem == "contract_test" else file
        if slow := item.get_closest_marker("slow"):
            assert slow.args, f"{item.nodeid} does not say why it is slow"
            group = item.nodeid if item.path.stem in UNGROUPED else group
        item.add_marker(pytest.mark.xdist_group(group))
        runs = not slow or is_in_share(group, k, n)
        (selected if runs else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = selected
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Deletes compiled programs when they hold many memory maps.

    A process has at most 65,530 of them, and XLA crashes without any left.
    """
    group = (lambda test: test.path) if "PYTEST_XDIST_WORKER" not in os.environ else _group
    changes = nextitem is not None and group(item) != group(nextitem)
    # Without xdist, the slow tests of one file can hold too many.
    is_slow = item.get_closest_marker("slow") is not None
    most = MAX_MEMORY_MAPS if changes else 2 * MAX_MEMORY_MAPS
    if (changes or is_slow) and _memory_maps() > most:
        jax.clear_caches()
        gc.collect()


def _memory_maps() -> int:
    maps = Path("/proc/self/maps")
    return maps.read_text().count("\n") if maps.exists() else 0


def _group(item: pytest.Item) -> str:
    return str(next(item.iter_markers("xdist_group")).args[0])
