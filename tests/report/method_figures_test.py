"""Tests of figures of the arrays and diagnostics that methods expose."""

import numpy as np

from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.report import html_page, method_figures


def draw_array(name, *values, layers=(), rounds=(5, 10)):
    pictures = {**METHODS["fedem"].pictures, **METHODS["clustered_fl"].pictures}
    for method in ("pfedla", "pfedhn", "factorized_fl"):
        pictures |= METHODS[method].pictures
    exposed = {name: (list(rounds)[: len(values)], list(values))}
    figures = method_figures.draw_arrays(exposed, layers, pictures)
    return figures.get(name)


def heat_maps(figure):
    """Returns the arrays of a figure's heat maps."""
    return [np.asarray(image.get_array()) for axes in figure.axes for image in axes.images]


def test_layer_weights_are_heat_maps_of_the_last_evaluation():
    first, last = np.random.default_rng(0).random((2, 4, 3, 4))
    figure = draw_array("alpha", first, last, layers=("conv1", "conv2", "fc1"))
    maps = heat_maps(figure)
    assert len(maps) == 3
    for j in range(3):
        np.testing.assert_array_equal(maps[j], last[:, j])
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["conv1", "conv2", "fc1"]
    scales = {image.get_clim() for axes in figure.axes for image in axes.images}
    assert scales == {(last.min(), last.max())}  # one scale for all
    assert figure.get_label() == (
        "After round 10: weight of each client's layer in the model of a client."
    )


def test_unnamed_layers_are_numbered_and_limited():
    figure = draw_array("alpha", np.ones((2, 15, 2)), layers=("a", "b"))
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == [f"layer {j}" for j in range(1, 13)]
    assert "the first 12 layers, without 3 others" in figure.get_label()


def test_matrix_is_a_heat_map_with_the_methods_axis_labels():
    values = np.array([[1.0, -0.5], [-0.5, 1.0]])
    figure = draw_array("pi", values)
    np.testing.assert_array_equal(heat_maps(figure), [values])
    axes, _ = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("component", "client")


def test_vector_is_a_bar_chart():
    figure = draw_array("cluster", np.array([0, 2, 1]))
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == [0, 2, 1]


def test_scatter_of_embeddings_keeps_distances_and_can_be_written():
    """Two principal components keep all distances of points in a plane."""
    rng = np.random.default_rng(1)
    plane = rng.normal(size=(6, 2))
    turned = plane @ np.linalg.qr(rng.normal(size=(3, 3)))[0][:2] + 5
    figure = draw_array("embeddings_group0", turned)
    points = np.asarray(figure.axes[0].collections[0].get_offsets())

    def distances(x):
        return np.linalg.norm(x[:, None] - x[None], axis=-1)

    np.testing.assert_allclose(distances(points), distances(plane), atol=1e-9)
    assert [text.get_text() for text in figure.axes[0].texts] == list("012345")
    assert html_page.png(figure).startswith(b"\x89PNG")


def test_unknown_arrays_keep_their_name_and_others_are_skipped():
    assert "my signal" in draw_array("my_signal", np.ones(3)).get_label().replace("_", " ")
    assert draw_array("alpha", np.full((2, 1, 2), np.nan)) is None
    assert draw_array("alpha", np.ones((2, 2, 2, 2))) is None
    assert draw_array("alpha", np.ones((0, 3))) is None


def test_diagnostics_have_a_panel_each():
    peers = [{"conv": 4.0, "head": 3.0}, {"conv": 3.5, "head": 1.5}]
    lines = [
        {"round": 5, "diagnostics": {"peers": peers[0], "one_hot": 0.0}},
        {"round": 10, "diagnostics": {"peers": peers[1], "one_hot": 0.1, "moving": 1.0}},
    ]
    (figure,) = method_figures.draw_diagnostics(METHODS["pfedla"].diagnostics, lines).values()
    first, second, third = figure.axes
    curves = {line.get_label(): line.get_ydata().tolist() for line in first.lines}
    assert curves == {"conv": [4.0, 3.5], "head": [3.0, 1.5]}
    assert second.lines[0].get_ydata().tolist() == [0.0, 0.1]
    assert second.get_ylim() == (-0.05, 1.05)
    assert third.lines[0].get_xdata().tolist() == [10]
    assert method_figures.draw_diagnostics({}, lines) == {}
