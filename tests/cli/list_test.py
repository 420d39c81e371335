"""The listing names everything, in 100 columns."""

import itertools
import re
from pathlib import Path

import pytest
from absl.flags import FlagValues

from fedjax_pfl import algorithms, data, networks
from fedjax_pfl.algorithms.fedfomo.method import REFERENCES
from fedjax_pfl.algorithms.per_fedavg import VARIANTS
from fedjax_pfl.algorithms.pfedla.layer_weights import NORMALISE
from fedjax_pfl.algorithms.shared.matching import RULES
from fedjax_pfl.cli import list as command
from fedjax_pfl.cli.command import Call
from fedjax_pfl.core import task
from fedjax_pfl.networks.factorized import LAYOUTS
from fedjax_pfl.presets import SYSTEMS
from fedjax_pfl.settings import configuration, listing
from fedjax_pfl.settings.general import SETTING_GROUPS, SETTINGS, settings_with
from tests.commands import message

EXPORTED = {
    "methods": algorithms.METHODS,
    "datasets": data.SOURCES,
    "partitions": data.PARTITIONS,
    "models": networks.MODELS,
    "tasks": {"auto": task.infer_task, **task.TASKS},
}


@pytest.mark.parametrize("kind", command.KINDS)
def test_fits_a_terminal(kind):
    assert max(map(len, command.text(kind).splitlines())) <= 100


def entries(kind):
    """Of each name its description, and its settings: name, default and meaning."""
    parts = re.split(r"^  (?=\w)", command.text(kind), flags=re.MULTILINE)[1:]
    whole = [re.split(r"^    (?=\w)", part, flags=re.MULTILINE) for part in parts]
    return {head.split()[0]: (head, [one.split(maxsplit=2) for one in own]) for head, *own in whole}


@pytest.mark.parametrize("kind", EXPORTED)
def test_names_everything_with_a_description_and_its_settings(kind):
    found, default = entries(kind), configuration.default()
    assert list(found) == list(EXPORTED[kind])
    for name, (head, own) in found.items():
        assert len(head.split()) > 1, name
        usual = {
            key: "unset" if value is None else str(value).replace(" ", "") or '""'
            for key, value in default.get(name, {}).items()
        }
        assert {key: value for key, value, _ in own} == usual, name
        told = configuration.meanings(listing.TABLES[kind][1][name])
        assert {key: " ".join(meaning.split()) for key, _, meaning in own} == told, name


@pytest.mark.parametrize("kind", EXPORTED)
def test_every_setting_of_everything_has_its_meaning_and_nothing_else_has(kind):
    for name, factory in listing.TABLES[kind][1].items():
        told = configuration.meanings(factory)
        assert set(told) == set(configuration.factory_settings(factory)), name
        assert all(re.search(r"\w\w", meaning) for meaning in told.values()), name


def test_meanings_are_read_from_docstrings():
    class One:
        """A line.

        Args:
          a, b: of both.
          c: of one: what is
            wrapped: too.

        Returns:
          d: nothing.
        """

    class More(One):
        """Another line.

        Args:
          b: its own.
        """

    assert configuration.meanings(More) == {
        "a": "of both",
        "b": "its own",
        "c": "of one: what is wrapped: too",
    }
    assert configuration.meanings(lambda: None) == {}


@pytest.mark.parametrize(
    ("method", "name", "choices"),
    [
        ("factorized_fl", "matching", RULES),
        ("factorized_fl", "layout", LAYOUTS),
        ("factorized_fl", "share", ("all", "u")),
        ("factorized_fl", "pruned", ("travel", "evaluation")),
        ("fedfomo", "reference", REFERENCES),
        ("fedmn", "gates", ("soft", "hard")),
        ("per_fedavg", "variant", VARIANTS),
        ("pfedla", "granularity", ("layer", "model")),
        ("pfedla", "normalise", NORMALISE),
    ],
)
def test_the_meaning_of_a_methods_setting_names_all_choices(method, name, choices):
    meaning = configuration.meanings(configuration.ALGORITHMS[method])[name]
    assert set(choices) <= set(re.findall(r"\w+", meaning))


def test_a_method_is_listed_by_its_name_in_papers_too():
    found = dict(re.findall(r"^  (\w+) +(\S.*?):", listing.listing("methods"), re.MULTILINE))

    def plain(text):
        return re.sub(r"[^a-z]", "", text.lower().replace("+", "plus"))

    for name in algorithms.METHODS:
        assert plain(name) in plain(found[name]), name


def test_the_docs_say_what_every_method_is_called():
    lines = (Path(__file__).parents[2] / "docs/index.md").read_text().splitlines()
    at = lines.index("| Method | `algorithm` | What it does |")
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines[at + 2 :]))
    named = re.findall(r"`(\w+)`", " ".join(row.split("|")[2] for row in rows))
    assert sorted(named) == sorted(algorithms.METHODS)


def test_defaults_are_those_of_a_configuration():
    own = {name: value for name, value, _ in entries("partitions")["classes"][1]}
    assert own == {"per_client": "4", "examples": "160"}  # which are not those of the function


GENERAL_NAMES = [name for group in SETTING_GROUPS.values() for name in group]


def test_every_general_setting_has_its_default_and_its_meaning():
    default = configuration.default()
    assert len(GENERAL_NAMES) == len(set(GENERAL_NAMES))
    owners = {name for table in configuration.BUILTINS for name in table}
    assert set(GENERAL_NAMES) == set(default) - owners
    found = dict(re.findall(r"^    (\w+) +(\S+ +\S.*)$", listing.listing("settings"), re.MULTILINE))
    assert set(found) >= set(GENERAL_NAMES)
    for name in GENERAL_NAMES:
        usual, meaning = found[name].split(maxsplit=1)
        assert usual == {None: "unset", "": '""'}.get(default[name], str(default[name]))
        assert meaning[0].isupper(), name
        assert SETTINGS[name].meaning.endswith("."), name


@pytest.mark.parametrize("name", settings_with("choices"))
def test_a_meaning_names_all_choices(name):
    assert set(SETTINGS[name].choices) <= set(re.findall(r"\w+", SETTINGS[name].meaning))


def test_presets_of_every_system():
    text = command.text("presets")
    for system in SYSTEMS:
        assert f"\n  {system} " in text
        assert max(map(len, SYSTEMS[system].__doc__.splitlines())) <= 100  # as --help shows it
    assert text.count("Presets are words") == text.count("\n  ") - text.count("\n   ")


def test_kinds(capsys):
    def print_lists(*words):
        command.print_lists(Call(words, FlagValues(), words))

    print_lists()
    everything = capsys.readouterr().out
    print_lists("models")
    models_only = capsys.readouterr().out
    assert models_only in everything
    assert "Methods" not in models_only
    line = message(print_lists, "method")
    assert line == "there is no kind 'method'; did you mean methods?"
    assert "there are datasets, methods" in message(print_lists, "zzzz")
    assert "name one kind" in message(print_lists, "methods", "models")
