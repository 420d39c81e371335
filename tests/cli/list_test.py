"""Tests that the listing describes everything, in 100 columns."""

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
UNSET = {None: "unset", "": '""'}


def entries(kind):
    """Returns the heading of every name and its settings: name, default, meaning."""
    parts = re.split(r"^  (?=\w)", command.text(kind), flags=re.MULTILINE)[1:]
    split = [re.split(r"^    (?=\w)", part, flags=re.MULTILINE) for part in parts]
    return {head.split()[0]: (head, [s.split(maxsplit=2) for s in lines]) for head, *lines in split}


@pytest.mark.parametrize("kind", EXPORTED)
def test_every_name_has_a_description_and_its_settings(kind):
    listed, default = entries(kind), configuration.default()
    assert list(listed) == list(EXPORTED[kind])
    for name, (head, settings) in listed.items():
        assert len(head.split()) > 1, name
        assert {key: value for key, value, _ in settings} == {
            key: UNSET.get(value, str(value).replace(" ", ""))
            for key, value in default.get(name, {}).items()
        }, name
        factory = listing.TABLES[kind][1][name]
        meanings = configuration.meanings(factory)
        assert {key: " ".join(text.split()) for key, _, text in settings} == meanings, name
        assert set(meanings) == set(configuration.factory_settings(factory)), name
        assert all(re.search(r"\w\w", text) for text in meanings.values()), name


def test_meanings_are_parsed_from_docstrings():
    class Base:
        """A line.

        Args:
          a, b: of both.
          c: of one: what is
            wrapped: too.

        Returns:
          d: nothing.
        """

    class Derived(Base):
        """Another line.

        Args:
          b: overridden.
        """

    assert configuration.meanings(Derived) == {
        "a": "of both",
        "b": "overridden",
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
        *((None, name, s.choices) for name, s in SETTINGS.items() if s.choices),
    ],
)
def test_the_meaning_of_a_setting_names_all_choices(method, name, choices):
    meanings = method and configuration.meanings(configuration.ALGORITHMS[method])
    meaning = meanings[name] if method else SETTINGS[name].meaning
    assert set(choices) <= set(re.findall(r"\w+", meaning))


def test_methods_are_listed_by_their_published_names():
    titles = dict(re.findall(r"^  (\w+) +(\S.*?):", listing.listing("methods"), re.MULTILINE))

    def letters(text):
        return re.sub(r"[^a-z]", "", text.lower().replace("+", "plus"))

    for name in algorithms.METHODS:
        assert letters(name) in letters(titles[name]), name


def test_the_documents_list_every_method():
    lines = (Path(__file__).parents[2] / "docs/index.md").read_text().splitlines()
    start = lines.index("| Method | `algorithm` | What it does |") + 2
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    names = re.findall(r"`(\w+)`", " ".join(row.split("|")[2] for row in rows))
    assert sorted(names) == sorted(algorithms.METHODS)


def test_every_general_setting_has_its_default_and_its_meaning():
    names = [name for group in SETTING_GROUPS.values() for name in group]
    default = configuration.default()
    assert len(names) == len(set(names))
    components = {name for table in configuration.BUILTINS for name in table}
    assert set(names) == set(default) - components
    text = listing.listing("settings")
    basic = re.findall(r"^    (\w+)", text.partition("  Advanced: ")[0], re.MULTILINE)
    assert set(basic) == set(settings_with("basic"))
    assert len(basic) == 10
    listed = dict(re.findall(r"^    (\w+) +(\S+ +\S.*)$", text, re.MULTILINE))
    for name in names:
        value, meaning = listed[name].split(maxsplit=1)
        assert value == UNSET.get(default[name], str(default[name]))
        assert meaning[0].isupper(), name
        assert SETTINGS[name].meaning.endswith("."), name


def test_presets_of_every_system():
    text = command.text("presets")
    for system in SYSTEMS:
        assert f"\n  {system} " in text
        assert max(map(len, SYSTEMS[system].__doc__.splitlines())) <= 100  # shown by --help
    assert text.count("Presets are words") == text.count("\n  ") - text.count("\n   ")


def test_one_kind_or_everything_is_printed(capsys):
    def print_lists(*kinds):
        command.print_lists(Call(kinds, FlagValues(), kinds))
        return capsys.readouterr().out

    everything, models = print_lists(), print_lists("models")
    assert max(map(len, everything.splitlines())) <= 100
    assert models in everything
    assert "Methods" not in models
    assert message(print_lists, "method") == "there is no kind 'method'; did you mean methods?"
    assert "there are datasets, methods" in message(print_lists, "zzzz")
    assert "name one kind" in message(print_lists, "methods", "models")
