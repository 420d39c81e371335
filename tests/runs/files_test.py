"""Tests of runs on data files, and of the commit that a run records."""

import json
import re
import subprocess

import chex
import jax
import numpy as np
import pytest

import fedjax_pfl
from fedjax_pfl.report import comparison, references, run_reader
from fedjax_pfl.runs import build, export, run_directory
from fedjax_pfl.runs.example_facts import example_facts
from fedjax_pfl.settings import configuration, custom, selection
from tests.commands import message


def table(tmp_path):
    """Returns settings of a run on a CSV file."""
    path = tmp_path / "t.csv"
    path.write_text("who,x,y\na,1,1.5\na,2,2.5\nb,3,3.5\nb,4,4.5\nc,5,5.5\nc,6,6.5\n")
    model = {"model": "mlp", "mlp": {"hidden": (2,)}}
    columns = {"owner": "who", "label": "y"}
    return {"dataset": f"csv:{path}", "csv": columns, **model, "partition": "natural", "clients": 2}


def built(settings):
    return build.build(configuration.complete(settings))


def replace(tmp_path, old, new):
    path = tmp_path / "t.csv"
    path.write_text(path.read_text().replace(old, new))


def test_a_run_without_results_makes_way_for_another(tmp_path):
    def begin(seed):
        with run_directory.claim(tmp_path, {"seed": seed, "rounds": 1}):
            return json.loads((tmp_path / "config.json").read_text())["seed"]

    first_files = ("provenance.json", "plan.json", "data.json", "metrics.jsonl")
    begin(0)
    (tmp_path / "checkpoints").mkdir()
    for seed in (0, 1):
        for name in first_files:
            (tmp_path / name).touch()
        assert begin(seed) == seed
        assert {p.name for p in tmp_path.iterdir()} == {"config.json", "checkpoints"}

    for result in ("checkpoints/2", "alpha.npz", "metrics.jsonl"):
        (tmp_path / result).write_text("x")
        assert "holds a run with other settings: seed (1 there, 0 here)" in message(begin, 0)
        assert (tmp_path / result).read_text() == "x"
        (tmp_path / result).unlink()
    assert begin(0) == 0


def test_a_file_name_selects_the_settings_of_its_source(tmp_path):
    config = configuration.complete(table(tmp_path))
    assert configuration.resolve(config)["csv"]["owner"] == "who"
    selection.check_used(table(tmp_path), [config])
    line = message(selection.check_used, table(tmp_path), [configuration.complete({})])
    assert "csv.owner counts with dataset=csv only" in line
    line = message(configuration.specify, configuration.complete({"dataset": "cvs:t"}))
    assert "there is no dataset 'cvs'; did you mean csv" in line


def test_a_changed_file_is_refused(tmp_path):
    experiment = built(table(tmp_path))
    assert experiment.remarks == (f"2 of the 3 owners of csv:{tmp_path}/t.csv are clients",)
    facts = example_facts(experiment)
    assert (facts["label"], facts["input"]) == ("y", ["x"])
    assert facts["score_deviation"] == pytest.approx(1)  # normalised targets
    (tmp_path / "checkpoints").mkdir()  # as after a kill before the first checkpoint
    for _ in range(2):
        run_directory.write_examples(tmp_path, facts)
    assert json.loads((tmp_path / "data.json").read_text()) == facts
    assert run_reader.read_digest(tmp_path) == facts["digest"]
    settings = table(tmp_path)
    replace(tmp_path, "c,", "cc,")  # another name of an owner
    changed = example_facts(built(settings))
    line = message(run_directory.write_examples, tmp_path, changed)
    assert "begun with other examples" in line


@pytest.mark.parametrize("content", [None, "{", "[]", '{"label": "y"}'])
def test_a_run_without_a_valid_digest_is_refused(tmp_path, content):
    facts = example_facts(built(table(tmp_path)))
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    if content is not None:
        (tmp_path / "data.json").write_text(content)
    line = message(run_directory.write_examples, tmp_path, facts)
    assert re.search(r"data\.json is missing or damaged, .* copy", line)


@pytest.mark.slow("two runs and their report")
def test_runs_on_different_examples_are_not_compared(tmp_path):
    """Changes the file between two runs with the same settings."""
    settings = {**table(tmp_path), "rounds": 1, "batch_size": 2, "evaluate_after": False}
    folder = tmp_path / "runs"
    fedjax_pfl.run({**settings, "algorithm": "local"}, folder / "local")
    replace(tmp_path, "6,6.5", "6,7.5")
    fedavg = {**settings, "algorithm": "fedavg"}
    fedjax_pfl.run(fedavg, folder / "fedavg")
    runs = [comparison.read(folder / name) for name in ("local", "fedavg")]
    rows = comparison.group(runs)
    assert comparison.paired_test(rows[1], rows[0], "before") == "other examples"
    assert not references.find(runs[1])
    with_reference = {**fedavg, "reference_runs": str(folder / "local")}
    line = message(fedjax_pfl.run, with_reference, folder / "with reference")
    assert "other examples" in line
    assert "begun with other examples" in message(export.load_result, folder / "local")


def test_a_run_starts_with_weights_of_pytorch(tmp_path):
    """The rate is so small that no weight changes. Another file is refused later."""
    network, path = fedjax_pfl.networks.MLP(1, (2,)), tmp_path / "w.safetensors"
    variables = network.init(jax.random.key(7), np.zeros((1, 1), np.float32))
    fedjax_pfl.to_torch(path, network, variables, (1,))
    settings = {**table(tmp_path), "rounds": 1, "batch_size": 2, "initial_weights": str(path)}
    settings |= {"algorithm": "fedavg", "learning_rate": 1e-20, "evaluate_after": False}
    result = fedjax_pfl.run(settings, tmp_path / "run")
    chex.assert_trees_all_equal(result.state.server, variables)
    fedjax_pfl.to_torch(path, network, jax.tree.map(lambda w: w + 1, variables), (1,))
    line = message(fedjax_pfl.run, settings, tmp_path / "run")
    assert "begun with other initial weights" in line
    path.unlink()
    assert "w.safetensors cannot be read: No such file" in message(built, settings)


def test_the_deviation_of_targets_uses_training_examples():
    x, y = np.zeros((8, 2), np.float32), np.array([1.0, 9, 5, 5, 1, 9, 5, 5])
    settings = {"partition": "iid", "clients": 2, "test_fraction": 0.5, "model": "mlp"}
    dataset = fedjax_pfl.arrays(x, y, name="mine")
    registry, settings = custom.register(settings, dataset=dataset)
    experiment = build.build(configuration.complete(settings, registry), registry=registry)
    train = experiment.data.train
    rows = np.concatenate([r[:n] for r, n in zip(train.rows, train.size, strict=True)])
    assert len(rows) == 4
    deviation = pytest.approx(np.std(y[rows]))
    assert example_facts(experiment) == {"score_deviation": deviation}


def test_mixed_owners_give_a_remark(tmp_path):
    experiment = built({**table(tmp_path), "partition": "iid"})
    line = f"csv:{tmp_path}/t.csv has 3 owners, and partition=iid mixes"
    assert experiment.remarks[0].startswith(line)
    assert example_facts(built({})) == {}


def test_a_network_that_does_not_suit_the_data_is_refused(tmp_path):
    line = message(built, {**table(tmp_path), "model": "small"})
    assert re.search("small .* does not suit .*; use mlp$", line)
    speeches = {"dataset": "speeches", "partition": "natural", "clients": 12}
    assert "use lstm or transformer" in message(built, speeches)


def test_a_run_records_the_commit_of_the_library(tmp_path, monkeypatch):
    """Records nothing if the library is not part of the surrounding checkout."""
    library = tmp_path / "library.py"
    library.write_text("1")
    monkeypatch.setattr(run_directory, "__file__", str(library))

    def commit_of(name):
        (tmp_path / name).mkdir(exist_ok=True)
        run_directory.write_provenance(tmp_path / name)
        return json.loads((tmp_path / name / "provenance.json").read_text()).get("commit")

    def git(*arguments):
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert commit_of("no checkout") is None
    git("init")
    git("commit", "--allow-empty", "-m", "another project")
    assert commit_of("another checkout") is None
    git("add", library.name)
    git("commit", "-m", "library")
    commit = git("rev-parse", "--short", "HEAD")
    assert commit_of("checkout") == commit
    library.write_text("2")
    assert commit_of("changed") == f"{commit}-dirty"
    resumed = f"{commit}; then {commit}-dirty"
    assert [commit_of("checkout") for _ in range(2)] == [resumed, resumed]
    assert commit_of("no checkout") == f"unknown; then {commit}-dirty"
    damaged = tmp_path / "changed" / "provenance.json"
    damaged.write_text("{")
    run_directory.write_provenance(damaged.parent)
    assert damaged.read_text() == "{"
    monkeypatch.setenv("PATH", "")
    assert commit_of("no git") is None
