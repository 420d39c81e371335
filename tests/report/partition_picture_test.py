import io

import numpy as np
import pytest

from fedjax_pfl.data import arrays, federate, load
from fedjax_pfl.data.dataset import Normalisation
from fedjax_pfl.report import partition_picture
from fedjax_pfl.report.partition_picture import draw_partition

# The first save in a process may import what matplotlib's backends bring along.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")


def test_few_clients_are_bubbles_and_held_out_clients_are_red():
    data, federation = federate(load("digits"), "iid", clients=4, held_out=1)
    figure = draw_partition(data, federation)
    grid, side = figure.axes
    assert len(grid.collections[0].get_offsets()) == 40
    assert str(federation.class_counts.max()) in grid.get_title()
    widths = [bar.get_width() for bar in side.containers[0]]
    np.testing.assert_array_equal(widths, federation.counts)
    colours = [label.get_color() for label in grid.get_yticklabels()]
    assert colours[:3] == ["black"] * 3
    assert colours[3] != "black"
    assert "held-out clients are red" in figure.get_label()
    figure.savefig(io.BytesIO(), dpi=50)


def test_many_clients_are_a_heat_map():
    dataset = load("synthetic", shape=(1,), examples=2000, test_examples=0)
    data, federation = federate(dataset, "iid", clients=200)
    figure = draw_partition(data, federation)
    assert "red" not in figure.get_label()
    image = figure.axes[0].images[0].get_array()
    np.testing.assert_array_equal(image.filled(0), federation.class_counts)


def test_domains_have_all_classes():
    dataset = arrays(np.zeros((40, 1)), np.arange(40) % 4)
    data, federation = federate(dataset, "domains", clients=2, settings={"domains": 2})
    assert len(draw_partition(data, federation).axes[0].get_xticks()) == 4


def test_regression_has_ranges_of_the_target():
    """Each of the targets 0 to 19 falls into a separate range."""
    y = np.stack([np.arange(20.0), np.zeros(20)], -1)
    data, federation = federate(arrays(np.zeros((20, 1)), y), "iid", clients=2)
    figure = draw_partition(data, federation)
    (points,) = figure.axes[0].collections
    cells = {(int(x), int(client)) for x, client in np.asarray(points.get_offsets())}
    assert len(cells) == federation.counts.sum()
    for client in range(2):
        rows = np.asarray(data.train.rows)[client, : np.asarray(data.train.size)[client]]
        targets = {int(value) for value in np.asarray(data.y)[rows, 0]}
        assert {x for x, owner in cells if owner == client} == targets
    ticks = figure.axes[0].get_xticklabels()
    assert (ticks[0].get_text(), ticks[-1].get_text()) == ("0", "19")
    assert figure.axes[0].get_xlabel() == "the first of 2 targets"
    assert "training examples of each range of the first of 2 targets" in figure.get_label()


def test_ranges_of_a_normalised_target_are_those_of_the_dataset():
    dataset = arrays(np.zeros((20, 1)), np.linspace(100.0, 480.0, 20))
    normalise = Normalisation("federation", np.zeros(1, bool), targets=True)
    data, federation = federate(dataset._replace(normalise=normalise), "iid", clients=2)
    assert np.abs(np.asarray(data.y)).max() < 2
    ticks = draw_partition(data, federation).axes[0].get_xticklabels()
    assert (ticks[0].get_text(), ticks[-1].get_text()) == ("100", "480")


def test_examples_with_several_classes_are_only_counted(monkeypatch):
    y = np.arange(60, dtype=np.int32).reshape(20, 3) % 4
    data, federation = federate(arrays(np.zeros((20, 3), np.int32), y), "iid", clients=2)
    figure = draw_partition(data, federation)
    (points,) = figure.axes[0].collections
    assert {int(x) for x, _ in np.asarray(points.get_offsets())} == {0}
    assert figure.axes[0].get_title().startswith("training examples (largest: ")
    assert not len(figure.axes[0].get_xticks())
    line = "Of each client: training examples, and the sizes of its splits."
    assert figure.get_label() == line
    monkeypatch.setattr(partition_picture, "_MAX_ROWS", 1)
    figure = draw_partition(data, federation)
    assert len(figure.axes) == 1
    assert figure.get_label().startswith("Distribution over 2 clients of their examples. Half")


def test_very_many_clients_are_histograms(monkeypatch):
    monkeypatch.setattr(partition_picture, "_MAX_ROWS", 39)
    data, federation = federate(load("digits"), "classes", clients=40, settings={"examples": 20})
    figure = draw_partition(data, federation)
    sizes, classes = figure.axes
    train, test = sizes.patches
    assert train.get_data().values.sum() == test.get_data().values.sum() == 40
    (size,) = np.unique(federation.counts)
    edges = train.get_data().edges
    (place,) = np.flatnonzero(train.get_data().values)
    assert edges[place] <= size < edges[place + 1]
    assert [bar.get_height() for bar in classes.patches] == [0, 0, 0, 0, 40]
    assert "Distribution over 40 clients" in figure.get_label()
