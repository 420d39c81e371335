"""The benchmark's adapters against stand-ins for the checkouts; see tests/checkouts/README.md.

What is tried: that an adapter finds what it calls, gives its rival the work that is asked for, and
refuses a rival whose work is another. That the names are those of the real checkouts is not: the
versions that they were run with stand in third_party/README.md.
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

CHECKOUTS = Path(__file__).parents[1] / "checkouts"
FEDAVG = Work("", network="mlp", clients=3, cohort=2, examples=8, epochs=2, batch=4)
PFEDHN = Work(
    "", clients=4, cohort=1, examples=12, local_steps=3, batch=4, rounds=5, algorithm="pfedhn"
)
ASKED = {
    "pfedhn": [PFEDHN],
    "fl_bench": [FEDAVG, FEDAVG._replace(algorithm="pfedla", network="lenet")],
    "pfllib": [FEDAVG, FEDAVG._replace(network="resnet9", cohort=3)],
    "fedjax": [FEDAVG],
}


def spec(asked, **changes):
    size = work.parameters(MODELS[asked.network](outputs=10))
    return {**asked.spec(size), **changes}


def standing(name, place):
    """A stand-in's folder, and what starts its adapter."""
    checkout = place / "checkout"
    if not checkout.exists():
        shutil.copytree(CHECKOUTS / name, checkout)
        if name != "fedjax":
            inside = checkout / "system" if name == "pfllib" else checkout
            shutil.copytree(CHECKOUTS / "torch", inside, dirs_exist_ok=True)
    start = [sys.executable, str(rivals.ADAPTERS / rivals.RIVALS[name].script)]
    return start, rivals.checkout(name, str(checkout))


def adapter(name, place, asked):
    """It, on a stand-in that stands by itself in a folder."""
    start, path = standing(name, place)
    return Child(start, {**asked, "checkout": path}, 120.0)


def cases():
    return [(name, asked) for name, each in ASKED.items() for asked in each]


@pytest.mark.parametrize(
    ("name", "asked"), cases(), ids=lambda value: value if isinstance(value, str) else value.network
)
def test_an_adapter_does_the_work_that_is_asked_for(name, asked, tmp_path):
    wanted = spec(asked)
    one = adapter(name, tmp_path, wanted)
    about = one.wait_until_ready()
    keys = ("parameters", "client_steps", "batch")
    assert {key: about[key] for key in keys} == {key: wanted[key] for key in keys}
    assert set(about) == {*keys, "versions"}
    assert 0 < one.go() < 100
    assert one.go() > 0
    one.close()


@pytest.mark.parametrize("name", rivals.RIVALS)
def test_another_work_is_refused(name, tmp_path):
    asked = ASKED[name][0]
    for changes in ({"parameters": 5}, {"batch": 13}):
        with pytest.raises(Gone, match="its work is another: "):
            adapter(name, tmp_path, spec(asked, **changes)).wait_until_ready()
    other = "fedavg" if name == "pfedhn" else "clustered_fl"
    with pytest.raises(Gone, match=r"^it(s adapter runs| is) "):
        adapter(name, tmp_path, spec(asked, algorithm=other)).wait_until_ready()


@pytest.mark.parametrize("name", ["fl_bench", "pfllib"])
def test_memory_with_many_clients_who_share_a_pool(name, tmp_path):
    """501 clients have 40 images each of 20,000, so that the last one's are another's."""
    start, path = standing(name, tmp_path)
    row = many_clients.measure_library(start, path, 501, 2, most=4.0, limit=120.0)
    assert row["clients"] == 501
    assert 10**7 < row["peak"] < 4 * 2**30
    with pytest.raises(Gone, match=r"^it (ended|needs) "):
        many_clients.measure_library(start, path, 501, 2, most=0.01, limit=120.0)


def test_clients_who_share_a_pool_share_files(tmp_path):
    """Sixteen images make two clients' files, and the third client has the first one's."""
    one = adapter("pfllib", tmp_path, spec(FEDAVG, pool=16))
    one.wait_until_ready()
    for part in ("train", "test"):
        first, second, third = (
            Path(one._folder.name, "inside", "dataset", "Cifar10", part, f"{i}.npz")
            for i in range(3)
        )
        assert third.samefile(first)
        assert not second.samefile(first)
    one.close()


def test_clients_who_share_a_pool_have_its_images(tmp_path):
    """Of sixteen: the third client has the first one's eight."""
    one = adapter("fl_bench", tmp_path, spec(FEDAVG, pool=16))
    one.wait_until_ready()
    split = Path(one._folder.name, "inside", "data", "cifar10", "partition.pkl")
    held = [own["train"] for own in pickle.loads(split.read_bytes())["data_indices"]]
    assert held == [[*range(8)], [*range(8, 16)], [*range(8)]]
    one.close()


def test_the_authors_pfedhn_looks_at_one_test_image_and_counts_between_its_steps(tmp_path):
    """The look is no training batch, and a step more of a client would be other work."""
    with pytest.raises(Gone, match="it takes one client in each step"):
        adapter("pfedhn", tmp_path, spec(PFEDHN, client_steps=16)).wait_until_ready()
    trainer = tmp_path / "checkout" / "experiments" / "pfedhn" / "trainer.py"
    text = trainer.read_text()
    looked = "loss(*next(iter(nodes.test_loaders[step % num_nodes])))"
    assert looked in text
    check = "assert len(next(iter(nodes.test_loaders[step % num_nodes]))[0]) == 1"
    trainer.write_text(text.replace(looked, f"{looked}\n            {check}"))
    one = adapter("pfedhn", tmp_path, spec(PFEDHN))
    assert one.wait_until_ready()["client_steps"] == 15
    one.close()


def test_what_is_not_installed_is_named(tmp_path):
    one = adapter("pfllib", tmp_path, spec(FEDAVG))
    one.close()
    (tmp_path / "checkout" / "system" / "h5py.py").write_text("raise ImportError")
    with pytest.raises(Gone, match=r"it needs h5py, which .* has not"):
        adapter("pfllib", tmp_path, spec(FEDAVG)).wait_until_ready()
