"""Fixtures of the tests of runs."""

import dataclasses
import shutil

import pytest
from ml_collections import ConfigDict

from fedjax_pfl.report import page
from fedjax_pfl.runs import runner
from tests.runs.common import BASE


def with_seed(config, seed):
    """Returns a copy of a configuration with another seed."""
    copy = ConfigDict(config)
    copy.seed = seed
    return type(config)(copy)


def with_seeds(phase, seeds):
    """Returns a phase of runs with these seeds and the same compiled rounds."""
    pairs = zip(phase.inputs.configs, seeds, strict=True)
    configs = [with_seed(config, seed) for config, seed in pairs]
    return phase._replace(inputs=dataclasses.replace(phase.inputs, configs=configs))


@pytest.fixture(scope="module", autouse=True)
def write_page():
    """Compiles each configuration once and replaces reports by an empty page.

    The seed is an argument of the compiled program, so one program serves all seeds. The value of
    the fixture is the function that writes a real report.
    """
    build, cache, write = runner.build, {}, page.write

    def cached_build(*configs, **settings):
        key = "".join(with_seed(config, 0).to_json() for config in configs)
        plans = settings.get("plans")
        if key not in cache or (plans and plans != [phase.plan for phase in cache[key].phases]):
            cache[key] = build(*configs, **settings)
        seeds = [config.seed for config in configs]
        phases = tuple(with_seeds(phase, seeds) for phase in cache[key].phases)
        return cache[key]._replace(phases=phases)

    def write_empty(run, extra_figures, references):
        (run.directory / "figures").mkdir(exist_ok=True)
        (run.directory / "report.html").write_text("a page")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "build", cached_build)
        patch.setattr(page, "write", write_empty)
        yield write


@pytest.fixture(scope="module")
def finished(tmp_path_factory, write_page):
    """A run with its real report, and its directory. Tests must not write to the directory."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "write", write_page)
        return runner.run(BASE, directory), directory


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the directory of the finished run."""
    shutil.copytree(finished[1], tmp_path / "run")
    return tmp_path / "run"
