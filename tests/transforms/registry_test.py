"""Transforms that settings ask for: each brings its rows, and nothing else knows of it."""

import re

import jax

from fedjax_pfl import transforms
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.general import SETTING_GROUPS, SETTINGS
from tests import documents, tiny
from tests.transforms.upload_noise_test import UP, scripted

DATA, FEDERATION = tiny.federated()


def around():
    return transforms.Around(tiny.Net(), FEDERATION, DATA, configuration.BUILTINS._asdict())


def value_of(**settings):
    return {**{name: row.default_value for name, row in SETTINGS.items()}, **settings}.__getitem__


def test_each_brings_its_own_rows():
    brought = [name for one in transforms.REGISTRY for name in one.settings]
    assert len(brought) == len(set(brought)) == len(transforms.SETTINGS)
    for one in transforms.REGISTRY:
        assert one.settings
        for name, row in one.settings.items():
            assert SETTING_GROUPS[one.title][name] is SETTINGS[name] is row


def test_by_default_none_is_asked_for():
    assert transforms.asked_for(value_of(), around()) == []


def test_each_can_be_asked_for_in_their_order():
    asked = {"keep_head": True, "upload_clip_norm": 2.5, "upload_bits": 8}
    assert len(transforms.asked_for(value_of(**asked, server_optimizer="adam"), around())) == 4
    names = [next(iter(one.settings)) for one in transforms.REGISTRY]
    assert names == ["keep_head", "upload_clip_norm", "upload_bits", "server_optimizer"]


def test_nothing_else_in_the_library_names_their_settings():
    """What is said of one transform is said in its file, so that another is a file and a line."""
    folder = documents.DOCS.parent / "fedjax_pfl"
    names = "|".join(transforms.SETTINGS)
    for path in folder.rglob("*.py"):
        place = str(path.relative_to(folder))
        if not place.startswith(("transforms/", "presets/")):
            found = set(re.findall(rf"[\"'.]({names})\b", path.read_text()))
            # A caller's own is brought under the name of its setting.
            assert found <= ({"server_optimizer"} if place == "settings/custom.py" else set()), (
                place
            )


def test_a_method_begins_without_what_transforms_kept():
    """State of a phase that had two of them, for a method that has none."""
    bare = transforms.chain(scripted(UP))
    two = transforms.chain(bare, transforms.compression(FEDERATION, DATA, bits=8, feedback=False))
    state = two.init(jax.random.key(0))
    assert state.clients.method == ()
    seen = []
    spy = scripted(UP)._replace(init=lambda key, start=None: seen.append(start) or start)
    transforms.chain(spy).init(jax.random.key(0), state)
    assert seen == [state._replace(clients=())]
