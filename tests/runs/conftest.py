"""What all tests of runs share."""

import dataclasses

import pytest
from ml_collections import ConfigDict

from fedjax_pfl.report import page as report
from fedjax_pfl.runs import runner
from tests.runs.common import BASE


def with_seed(config, seed):
    other = ConfigDict(config)
    other.seed = seed
    return type(config)(other)


def seeded(phase, seeds):
    """The same phase, compiled once, of points with these seeds."""
    alike = [with_seed(one, seed) for one, seed in zip(phase.inputs.alike, seeds, strict=True)]
    return phase._replace(inputs=dataclasses.replace(phase.inputs, alike=alike))


@pytest.fixture(scope="module", autouse=True)
def real_report():
    """Compile each configuration once, and let an empty page stand for the report.

    A seed is the key that a program is given, so that one program does for all seeds.
    """
    made, built, written = runner.build, {}, report.write

    def once(*points, **how):
        key = "".join(with_seed(one, 0).to_json() for one in points)
        plans = how.get("plans")
        if key not in built or (plans and plans != [phase.plan for phase in built[key].phases]):
            built[key] = made(*points, **how)
        seeds = [one.seed for one in points]
        return built[key]._replace(phases=tuple(seeded(one, seeds) for one in built[key].phases))

    def page(run, extra_figures, beside):
        directory = run.directory
        (directory / "figures").mkdir(exist_ok=True)
        (directory / "report.html").write_text("a page")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "build", once)
        patch.setattr(report, "write", page)
        yield written


@pytest.fixture(scope="module")
def finished(tmp_path_factory, real_report):
    """One run with its real report. Nothing may be written to its directory."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write", real_report)
        return runner.run(BASE, directory), directory
