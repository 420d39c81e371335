"""Tests the adapters of the benchmark with stand-ins for the checkouts.

An adapter must import what it calls, give its rival the requested work, and refuse a rival that
does different work. The stand-ins are described in tests/checkouts/README.md. The versions of the
real checkouts that the adapters were run with are in third_party/README.md.
"""

import pickle
import shutil
import sys
from pathlib import Path

import pytest

from experiments import many_clients
from experiments.libraries import rivals, work
from experiments.libraries.rivals import Child, Gone
from experiments.libraries.work import Work
from fedjax_pfl.networks import MODELS

pytestmark = pytest.mark.slow("programs of the reference work")

CHECKOUTS = Path(__file__).parents[1] / "checkouts"
FEDAVG = Work("", network="mlp", clients=3, cohort=2, examples=8, epochs=2, batch=4)
PFEDHN = Work(
    "", clients=4, cohort=1, examples=12, local_steps=3, batch=4, rounds=5, algorithm="pfedhn"
)
WORKS = {
    "pfedhn": [PFEDHN],
    "fl_bench": [FEDAVG, FEDAVG._replace(algorithm="pfedla", network="lenet")],
    "pfllib": [FEDAVG, FEDAVG._replace(network="resnet9", cohort=3)],
    "fedjax": [FEDAVG],
}


def spec(requested, **changes):
    size = work.parameters(MODELS[requested.network](outputs=10))
    return {**requested.spec(size), **changes}


def stand_in(name, folder):
    """Copies a stand-in and returns the command of its adapter and the checkout."""
    checkout = folder / "checkout"
    if not checkout.exists():
        shutil.copytree(CHECKOUTS / name, checkout)
        if name != "fedjax":
            package_folder = checkout / "system" if name == "pfllib" else checkout
            shutil.copytree(CHECKOUTS / "torch", package_folder, dirs_exist_ok=True)
    command = [sys.executable, str(rivals.ADAPTERS / rivals.RIVALS[name].script)]
    return command, rivals.checkout(name, str(checkout))


def start_adapter(name, folder, spec):
    """Starts an adapter on a copy of its stand-in."""
    command, path = stand_in(name, folder)
    return Child(command, {**spec, "checkout": path}, 120.0)


def cases():
    return [(name, requested) for name, works in WORKS.items() for requested in works]


@pytest.mark.parametrize(
    ("name", "requested"),
    cases(),
    ids=lambda value: value if isinstance(value, str) else value.network,
)
def test_an_adapter_does_the_requested_work(name, requested, tmp_path):
    expected = spec(requested)
    adapter = start_adapter(name, tmp_path, expected)
    about = adapter.wait_until_ready()
    keys = ("parameters", "client_steps", "batch")
    assert {key: about[key] for key in keys} == {key: expected[key] for key in keys}
    assert set(about) == {*keys, "versions"}
    assert 0 < adapter.go() < 100
    assert adapter.go() > 0
    adapter.close()


@pytest.mark.parametrize("name", rivals.RIVALS)
def test_an_adapter_refuses_a_different_work(name, tmp_path):
    requested = WORKS[name][0]
    for changes in ({"parameters": 5}, {"batch": 13}):
        with pytest.raises(Gone, match="its work is another: "):
            start_adapter(name, tmp_path, spec(requested, **changes)).wait_until_ready()
    wrong_method = "fedavg" if name == "pfedhn" else "clustered_fl"
    with pytest.raises(Gone, match=r"^it(s adapter runs| is) "):
        start_adapter(name, tmp_path, spec(requested, algorithm=wrong_method)).wait_until_ready()


@pytest.mark.parametrize("name", ["fl_bench", "pfllib"])
def test_memory_with_many_clients_who_share_a_pool(name, tmp_path):
    """501 clients with 40 images each need more than the pool's 20,000: the last shares images."""
    command, path = stand_in(name, tmp_path)
    row = many_clients.measure_library(command, path, 501, 2, most=4.0, limit=120.0)
    assert row["clients"] == 501
    assert 10**7 < row["peak"] < 4 * 2**30
    with pytest.raises(Gone, match=r"^it (ended|needs) "):
        many_clients.measure_library(command, path, 501, 2, most=0.01, limit=120.0)


def test_clients_who_share_a_pool_share_files(tmp_path):
    """Sixteen images are two clients' files; the third client shares the files of the first."""
    adapter = start_adapter("pfllib", tmp_path, spec(FEDAVG, pool=16))
    adapter.wait_until_ready()
    for part in ("train", "test"):
        first, second, third = (
            Path(adapter._folder.name, "inside", "dataset", "Cifar10", part, f"{i}.npz")
            for i in range(3)
        )
        assert third.samefile(first)
        assert not second.samefile(first)
    adapter.close()


def test_clients_who_share_a_pool_have_its_images(tmp_path):
    """Sixteen images are enough for two clients; the third shares the images of the first."""
    adapter = start_adapter("fl_bench", tmp_path, spec(FEDAVG, pool=16))
    adapter.wait_until_ready()
    split = Path(adapter._folder.name, "inside", "data", "cifar10", "partition.pkl")
    train_rows = [
        split_rows["train"] for split_rows in pickle.loads(split.read_bytes())["data_indices"]
    ]
    assert train_rows == [[*range(8)], [*range(8, 16)], [*range(8)]]
    adapter.close()


def test_the_pfedhn_checkout_tests_on_one_image_between_steps(tmp_path):
    """The test image does not count as a training batch; a wrong number of steps is refused."""
    with pytest.raises(Gone, match="it takes one client in each step"):
        start_adapter("pfedhn", tmp_path, spec(PFEDHN, client_steps=16)).wait_until_ready()
    trainer = tmp_path / "checkout" / "experiments" / "pfedhn" / "trainer.py"
    text = trainer.read_text()
    test_loss = "loss(*next(iter(nodes.test_loaders[step % num_nodes])))"
    assert test_loss in text
    check = "assert len(next(iter(nodes.test_loaders[step % num_nodes]))[0]) == 1"
    trainer.write_text(text.replace(test_loss, f"{test_loss}\n            {check}"))
    adapter = start_adapter("pfedhn", tmp_path, spec(PFEDHN))
    assert adapter.wait_until_ready()["client_steps"] == 15
    adapter.close()


def test_missing_packages_are_named(tmp_path):
    adapter = start_adapter("pfllib", tmp_path, spec(FEDAVG))
    adapter.close()
    (tmp_path / "checkout" / "system" / "h5py.py").write_text("raise ImportError")
    with pytest.raises(Gone, match=r"it needs h5py, which .* has not"):
        start_adapter("pfllib", tmp_path, spec(FEDAVG)).wait_until_ready()
