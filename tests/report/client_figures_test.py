"""Tests of figures and quantiles of many clients."""

import math
import re

import numpy as np
import pytest

from fedjax_pfl.core.metrics import ACCURACY, SQUARED_ERROR
from fedjax_pfl.report import client_figures
from fedjax_pfl.report import page as report
from tests.report.page_test import evaluation, make_run

# The first save in a process may import what matplotlib's backends bring along.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")


def test_many_clients_are_a_histogram_and_quantiles(tmp_path):
    """A quarter of the clients each has score 0.5, 0.6, 0.7 and 0.8, so the median is 0.65."""
    run = make_run(tmp_path, [evaluation(1)], clients=2000)
    path = report.write(run)
    page = path.read_text()
    assert path.stat().st_size < 500_000
    table = page[page.index('<details class="clients">') :].partition("</details>")[0]
    assert "Clients: quantiles of 2,000" in table
    rows = dict(re.findall(r"<th scope=row>(.*?)</th><td[^>]*>(.*?)</td>", table.replace('"', "")))
    assert (rows["worst"], rows["median"], rows["best"]) == ("50.00", "65.00", "80.00")
    figure = client_figures.draw(run.clients, ACCURACY).figure
    served, *_ = figure.axes[0].patches
    counts = served.get_data().values
    assert counts[counts > 0].tolist() == [499, 500, 500, 500]  # client 0 does not take part
    expected, _ = np.histogram(
        [row["before_accuracy"] for row in run.clients[1:]], served.get_data().edges
    )
    np.testing.assert_array_equal(counts, expected)


def test_the_worst_error_is_the_largest():
    quantiles = client_figures.quantiles([1.0, 2.0, 3.0, math.nan], SQUARED_ERROR)
    assert (quantiles["worst"], quantiles["median"], quantiles["best"]) == (3.0, 2.0, 1.0)
    assert math.isnan(client_figures.quantiles([math.nan], ACCURACY)["median"])


def test_histogram_of_scores_that_differ_by_rounding():
    scores = [0.3 if i % 2 else 0.1 + 0.2 for i in range(client_figures.MAX_POINTS + 1)]
    clients = [{"client": i, "before_accuracy": v} for i, v in enumerate(scores)]
    assert client_figures.draw(clients, ACCURACY)


def test_attackers_are_marked_and_in_no_quantile(tmp_path):
    """Client 0 does not take part, client 1 attacks."""
    run = make_run(tmp_path, [evaluation(1)])
    run.clients[1]["attacker"] = 1
    figure = client_figures.draw(run.clients, ACCURACY).figure
    points = {line.get_label(): line.get_ydata().tolist() for line in figure.axes[0].lines}
    np.testing.assert_allclose(points["before"], [0.7, 0.8])
    np.testing.assert_allclose(points["before, attacker"], [0.6])
    np.testing.assert_allclose(points["before, not taking part"], [0.5])
    page = report.write(run).read_text()
    assert ">1, attacker</th>" in page
    many = make_run(tmp_path, [evaluation(1)], clients=1200)
    for row in many.clients[:100]:
        row["attacker"] = 1
    page = report.write(many).read_text()
    assert "Clients: quantiles of 1,100" in page
