"""Scores of very many clients: a histogram and quantiles in the place of each client."""

import math
import re

import numpy as np
import pytest

from fedjax_pfl.core.scores import ACCURACY, SQUARED_ERROR
from fedjax_pfl.report import client_figures
from fedjax_pfl.report import page as report
from tests.report.page_test import evaluation, make_run

# The first save in a process may import what matplotlib's backends bring along.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")


def test_very_many_clients_are_a_histogram_and_quantiles(tmp_path):
    """Scores .5 to .8, a fourth of the clients each: the median lies between .6 and .7."""
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
    whole, _ = np.histogram(
        [row["before_accuracy"] for row in run.clients[1:]], served.get_data().edges
    )
    np.testing.assert_array_equal(counts, whole)


def test_the_worst_of_an_error_is_the_largest():
    found = client_figures.quantiles([1.0, 2.0, 3.0, math.nan], SQUARED_ERROR)
    assert (found["worst"], found["median"], found["best"]) == (3.0, 2.0, 1.0)
    assert math.isnan(client_figures.quantiles([math.nan], ACCURACY)["median"])


def test_scores_that_differ_by_rounding_are_a_histogram():
    scores = [0.3 if i % 2 else 0.1 + 0.2 for i in range(client_figures.MAX_POINTS + 1)]
    clients = [{"client": i, "before_accuracy": v} for i, v in enumerate(scores)]
    assert client_figures.draw(clients, ACCURACY)
