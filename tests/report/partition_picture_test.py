import io

import numpy as np
import pytest

from fedjax_pfl.data import arrays, federate, load
from fedjax_pfl.report.partition_picture import draw_partition

# The first save in a process may import what matplotlib's backends bring along.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")


def saved(figure):
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=50)
    return file.getbuffer().nbytes


def test_few_clients_are_bubbles_and_novel_ones_are_red():
    data, federation, portions = federate(load("digits"), "iid", clients=4, held_out=1)
    figure = draw_partition(data, federation)
    grid, side = figure.axes
    np.testing.assert_array_equal(len(grid.collections[0].get_offsets()), 40)
    assert str(portions.train.max()) in grid.get_title()
    widths = [bar.get_width() for bar in side.containers[0]]
    np.testing.assert_array_equal(widths, federation.counts)
    colours = [label.get_color() for label in grid.get_yticklabels()]
    assert colours[:3] == ["black"] * 3
    assert colours[3] != "black"
    assert "held out are red" in figure.get_label()  # which is what stands beneath it
    assert saved(figure) > 1000


def test_many_clients_are_a_heat_map():
    dataset = load("synthetic", shape=(1,), examples=2000, test_examples=0)
    data, federation, portions = federate(dataset, "iid", clients=200)
    figure = draw_partition(data, federation)
    assert "red" not in figure.get_label()
    shown = figure.axes[0].images[0].get_array()
    np.testing.assert_array_equal(shown.filled(0), portions.train)
    assert saved(figure) > 1000


def test_domains_and_regressions_are_drawn_too():
    x = np.zeros((40, 1))
    for dataset, name, classes in (
        (arrays(x, np.arange(40) % 4), "domains", 4),
        (arrays(x, x), "iid", 1),
    ):
        given = {"domains": 2} if name == "domains" else {}
        data, federation, _ = federate(dataset, name, clients=2, settings=given)
        grid = draw_partition(data, federation).axes[0]
        assert len(grid.get_xticks()) == classes
