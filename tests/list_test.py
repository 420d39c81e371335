"""The listing names everything, in 100 columns."""

import itertools
import re

import pytest

from experiments import list as listing
from fedjax_pfl import algorithms, config, data, models, plan
from fedjax_pfl.data.federate import SPLITS
from fedjax_pfl.general import GENERAL
from tests.launch_test import message

EXPORTED = {
    "methods": algorithms.__all__,
    "datasets": data.SOURCES,
    "partitions": data.PARTITIONS,
    "models": models.MODELS,
}


@pytest.mark.parametrize("kind", listing.KINDS)
def test_fits_a_terminal(kind):
    assert max(map(len, listing.listing(kind).splitlines())) <= 100


@pytest.mark.parametrize("kind", EXPORTED)
def test_names_everything_with_a_description_and_its_defaults(kind):
    text = listing.listing(kind)
    found = dict(re.findall(r"^  (\w+) +(\S.*)$", text, re.MULTILINE))
    assert list(found) == list(EXPORTED[kind])
    words = text.split()
    for name in found:
        own = config.default().get(name)
        for key, value in (own or {}).items():
            shown = "unset" if value is None else str(value).replace(" ", "")
            assert {f"{key}={shown}", f"{key}={shown},"} & set(words), key


def test_a_method_is_listed_by_its_name_in_papers_too():
    found = dict(re.findall(r"^  (\w+) +(\S.*?):", listing.listing("methods"), re.MULTILINE))
    plain = lambda text: re.sub(r"[^a-z]", "", text.lower().replace("+", "plus"))
    for name in algorithms.__all__:
        assert plain(name) in plain(found[name]), name


def test_the_readme_says_what_every_method_is_called():
    lines = (listing.CONFIGS.parents[1] / "README.md").read_text().splitlines()
    at = lines.index("| Method | `algorithm` | What it does |")
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines[at + 2 :]))
    named = re.findall(r"`(\w+)`", " ".join(row.split("|")[2] for row in rows))
    assert sorted(named) == sorted(algorithms.__all__)


def test_defaults_are_those_of_a_configuration():
    entry = listing.listing("partitions").split("\n  classes ")[1].split("\n  listed ")[0]
    assert entry.endswith("examples=160, per_client=4")


GENERAL_NAMES = [name for group in GENERAL.values() for name in group]


def test_every_general_setting_has_its_default_and_its_meaning():
    default = config.default()
    assert len(GENERAL_NAMES) == len(set(GENERAL_NAMES))
    owners = {name for table in config.OURS for name in table}
    assert set(GENERAL_NAMES) == set(default) - owners
    found = dict(re.findall(r"^    (\w+) +(\S+ +\S.*)$", listing.listing("settings"), re.MULTILINE))
    assert set(found) >= set(GENERAL_NAMES)
    for name in GENERAL_NAMES:
        usual, meaning = found[name].split(maxsplit=1)
        assert usual == {None: "unset", "": '""'}.get(default[name], str(default[name]))
        assert re.match(r"[a-zA-Z]+[ ,:]", meaning), name


@pytest.mark.parametrize(
    ("name", "choices"),
    [("split", SPLITS), ("conv", plan.LOWERINGS), ("participants", config.PARTICIPANTS)],
)
def test_a_meaning_names_all_choices(name, choices):
    (meaning,) = (group[name].meaning for group in GENERAL.values() if name in group)
    assert set(choices) <= set(re.findall(r"\w+", meaning))


def test_presets_of_every_system():
    text = listing.listing("presets")
    for path in listing.CONFIGS.glob("[!_]*.py"):
        assert f"\n  {path.stem} " in text
    assert text.count("Presets are words") == text.count("\n  ") - text.count("\n   ")


def test_kinds(capsys):
    listing.main(["list"])
    everything = capsys.readouterr().out
    listing.main(["list", "models"])
    models_only = capsys.readouterr().out
    assert models_only in everything
    assert "Methods" not in models_only
    line = message(listing.main, ["list", "method"])
    assert line == "there is no kind 'method'; did you mean methods?"
    assert "there are datasets, methods" in message(listing.main, ["list", "zzzz"])
    assert "name one kind" in message(listing.main, ["list", "methods", "models"])
