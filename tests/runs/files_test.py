"""Runs on files that are named in the configuration."""

import json
import subprocess

import numpy as np
import pytest

import fedjax_pfl
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import comparison, references, run_reader
from fedjax_pfl.runs import build, export, run_directory
from fedjax_pfl.settings import configuration, custom, selection


def table(tmp_path, more=""):
    path = tmp_path / "t.csv"
    path.write_text(f"who,x,y\na,1,1.5\na,2,2.5\nb,3,3.5\nb,4,4.5\nc,5,5.5\nc,6,6.5\n{more}")
    given = {"owner": "who", "label": "y"}
    small = {"model": "mlp", "mlp": {"hidden": (2,)}, "partition": "natural", "clients": 2}
    return {"dataset": f"csv:{path}", "csv": given, **small}


def test_a_name_with_a_path_has_the_settings_of_its_source(tmp_path):
    config = configuration.complete(table(tmp_path))
    assert configuration.resolve(config)["csv"]["owner"] == "who"
    selection.check_used(table(tmp_path), [config])
    with pytest.raises(UsageError, match=r"csv\.owner counts with dataset=csv only"):
        selection.check_used(table(tmp_path), [configuration.complete({})])
    with pytest.raises(UsageError, match="there is no dataset 'cvs'; did you mean csv"):
        configuration.specify(configuration.complete({"dataset": "cvs:t"}))


def test_what_numbers_stand_for_is_kept_and_files_that_change_are_noticed(tmp_path):
    one = build.build(configuration.complete(table(tmp_path)))
    assert one.remarks == (f"2 of the 3 owners of csv:{tmp_path}/t.csv are clients",)
    facts = build.example_facts(one)
    assert (facts["label"], facts["input"]) == ("y", ["x"])
    assert facts["score_deviation"] == pytest.approx(1)  # normalised by these examples
    run_directory.write_examples(tmp_path, facts)
    run_directory.write_examples(tmp_path, facts)
    assert json.loads((tmp_path / "data.json").read_text()) == facts
    changed = configuration.complete(table(tmp_path))
    path = tmp_path / "t.csv"
    path.write_text(path.read_text().replace("c,", "cc,"))  # an owner has another name
    other = build.example_facts(build.build(changed))
    with pytest.raises(UsageError, match="begun with other examples") as error:
        run_directory.write_examples(tmp_path, other)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"label": "y"}'])
def test_a_run_whose_digest_is_lost_refuses_to_resume(tmp_path, content):
    facts = build.example_facts(build.build(configuration.complete(table(tmp_path))))
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    if content is not None:
        (tmp_path / "data.json").write_text(content)
    with pytest.raises(UsageError, match=r"data\.json is missing or damaged, .* copy") as error:
        run_directory.write_examples(tmp_path, facts)
    assert "\n" not in str(error.value)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins(tmp_path):
    facts = build.example_facts(build.build(configuration.complete(table(tmp_path))))
    (tmp_path / "checkpoints").mkdir()
    run_directory.write_examples(tmp_path, facts)
    assert run_reader.read_examples(tmp_path) == facts["digest"]


def test_a_run_is_not_compared_with_one_on_other_examples(tmp_path):
    """The file is replaced between two runs with the same settings."""
    settings = {**table(tmp_path), "rounds": 1, "batch_size": 2, "evaluate_after": False}
    fedjax_pfl.run({**settings, "algorithm": "local"}, tmp_path / "runs" / "alone")
    path = tmp_path / "t.csv"
    path.write_text(path.read_text().replace("6,6.5", "6,7.5"))
    fedjax_pfl.run({**settings, "algorithm": "fedavg"}, tmp_path / "runs" / "together")
    runs = [comparison.read(tmp_path / "runs" / name) for name in ("alone", "together")]
    rows = comparison.group(runs)
    assert comparison.paired_test(rows[1], rows[0], "before") == "other examples"
    assert not references.find(runs[1])
    with pytest.raises(UsageError, match="other examples") as error:
        fedjax_pfl.run(
            {**settings, "algorithm": "fedavg", "beside": str(runs[0].directory)},
            tmp_path / "runs" / "beside",
        )
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="begun with other examples"):
        export.load_result(runs[0].directory)


def test_the_deviation_of_targets_is_that_of_training_examples():
    x, y = np.zeros((8, 2), np.float32), np.array([1.0, 9, 5, 5, 1, 9, 5, 5])
    settings = {"partition": "iid", "clients": 2, "test_fraction": 0.5, "model": "mlp"}
    dataset = fedjax_pfl.arrays(x, y, name="mine")
    words, given = custom.register(settings, dataset=dataset)
    one = build.build(configuration.complete(given, words), registry=words)
    chosen = np.concatenate(
        [r[:n] for r, n in zip(one.data.train.rows, one.data.train.size, strict=True)]
    )
    assert len(chosen) == 4
    assert build.example_facts(one) == {"score_deviation": pytest.approx(np.std(y[chosen]))}


def test_owners_who_are_not_the_clients_are_remarked_on(tmp_path):
    one = build.build(configuration.complete({**table(tmp_path), "partition": "iid"}))
    assert one.remarks[0].startswith(f"csv:{tmp_path}/t.csv has 3 owners, and partition=iid mixes")
    assert build.example_facts(build.build(configuration.complete({}))) == {}


def test_a_network_for_pictures_is_refused_with_one_that_suits_rows(tmp_path):
    with pytest.raises(UsageError, match=r"small .* does not suit .*; use mlp$"):
        build.build(configuration.complete({**table(tmp_path), "model": "small"}))
    given = {"dataset": "speeches", "partition": "natural", "clients": 12}
    with pytest.raises(UsageError, match="use lstm or transformer"):
        build.build(configuration.complete(given))


def test_a_run_of_a_checkout_names_its_commit(tmp_path, monkeypatch):
    """A copy that is installed in somebody's checkout, where no commit is of it, names none."""
    here = tmp_path / "library.py"
    here.write_text("1")
    monkeypatch.setattr(run_directory, "__file__", str(here))

    def made(name):
        (tmp_path / name).mkdir(exist_ok=True)
        run_directory.write_provenance(tmp_path / name)
        return json.loads((tmp_path / name / "made.json").read_text()).get("commit")

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a"]
        done = subprocess.run(
            ["git", "-C", tmp_path, *who, *words], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    assert made("no_checkout") is None
    git("init")
    git("commit", "--allow-empty", "-m", "somebody's own")
    assert made("not_of_it") is None
    git("add", here.name)
    git("commit", "-m", "ours")
    commit = git("rev-parse", "--short", "HEAD")
    assert made("in_it") == commit
    here.write_text("2")
    assert made("changed") == f"{commit}-dirty"
    assert made("in_it") == made("in_it") == f"{commit}; then {commit}-dirty"  # it goes on
    assert made("no_checkout") == f"unknown; then {commit}-dirty"
    (tmp_path / "changed" / "made.json").write_text("{")
    run_directory.write_provenance(tmp_path / "changed")  # nothing depends on it
    assert (tmp_path / "changed" / "made.json").read_text() == "{"
    monkeypatch.setenv("PATH", "")
    assert made("no_git") is None
