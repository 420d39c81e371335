"""Tests of the registry of transforms and of `chain`."""

import re
from typing import NamedTuple

import jax

from fedjax_pfl import transforms
from fedjax_pfl.core.algorithm import State
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.general import SETTING_GROUPS, SETTINGS
from fedjax_pfl.testing import example
from tests import documents, tiny
from tests.transforms.privacy.local_level_test import UP, scripted

DATA, FEDERATION = tiny.federated()


CONTEXT = transforms.TransformContext(
    model=tiny.Net(),
    federation=FEDERATION,
    data=DATA,
    registry=configuration.BUILTINS._asdict(),
    training=example.training(),
)


def value_of(**settings):
    defaults = {name: setting.default_value for name, setting in SETTINGS.items()}
    return {**defaults, **settings}.__getitem__


def test_transforms_define_disjoint_settings():
    names = [name for selectable in transforms.REGISTRY for name in selectable.settings]
    assert len(names) == len(set(names)) == len(transforms.SETTINGS)
    for selectable in transforms.REGISTRY:
        assert selectable.settings
        for name, setting in selectable.settings.items():
            assert SETTING_GROUPS[selectable.title][name] is SETTINGS[name] is setting


def test_a_state_without_fields_is_no_record_of_a_transform():
    class Empty(NamedTuple):
        pass

    state = State((), (), Empty())
    inner = scripted(UP)._replace(init=lambda key, start=None: start or state)
    compression = transforms.compression(FEDERATION, DATA, bits=8)
    method = transforms.chain(inner, compression)
    key = jax.random.key(1)
    assert method.init(key, method.init(key)).clients.method == Empty()


def test_settings_select_transforms():
    assert transforms.selected_transforms(value_of(), CONTEXT) == []
    settings = {"keep_head": True, "privacy": "local", "upload_bits": 8}
    noise = {"privacy_clip_norm": 2.5, "privacy_noise": 1.0}
    value = value_of(
        **settings, **noise, server_optimizer="adam", robust_rule="krum", attack="sign_flip"
    )
    assert len(transforms.selected_transforms(value, CONTEXT)) == 6
    names = [next(iter(selectable.settings)) for selectable in transforms.REGISTRY]
    assert names == [*settings, "server_optimizer", "robust_rule", "attack"]


def test_noise_for_a_target_stays_if_the_rounds_change():
    assert transforms.fixed_noise(value_of(), FEDERATION) == {}
    settings = {"privacy": "client", "privacy_clip_norm": 1.0, "rounds": 7}
    fixed = transforms.fixed_noise(value_of(**settings, privacy_epsilon=8.0), FEDERATION)
    assert fixed["privacy_noise"] > 0
    changed = value_of(**{**settings, **fixed, "rounds": 1})
    assert transforms.fixed_noise(changed, FEDERATION) == fixed


def test_only_transforms_and_presets_name_their_settings():
    folder = documents.DOCS.parent / "fedjax_pfl"
    names = "|".join(transforms.SETTINGS)
    for path in folder.rglob("*.py"):
        relative = str(path.relative_to(folder))
        if not relative.startswith(("transforms/", "presets/")):
            matches = set(re.findall(rf"[\"'.]({names})\b", path.read_text()))
            # `register` has an argument of this name.
            allowed = {"server_optimizer"} if relative == "settings/custom.py" else set()
            assert matches <= allowed, relative


def test_chain_removes_records_of_transforms_from_the_start():
    wrapped = transforms.chain(
        transforms.chain(scripted(UP)),
        transforms.compression(FEDERATION, DATA, bits=8, feedback=False),
    )
    state = wrapped.init(jax.random.key(0))
    assert state.clients.method == ()
    starts = []
    spy = scripted(UP)._replace(init=lambda key, start=None: starts.append(start) or start)
    transforms.chain(spy).init(jax.random.key(0), state)
    assert starts == [state._replace(clients=())]
