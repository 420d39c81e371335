"""Tests of the figure of a confusion matrix against numbers worked out by hand."""

from fedjax_pfl.report import class_figures


def test_recall_of_classes():
    """Recalls are 3/4 and 1/2; class 1 has no test examples, and is predicted once."""
    confusion = {"classes": 3, "before": [[3, 0, 1], [0, 0, 0], [0, 1, 1]]}
    assert class_figures.sentence(confusion) == (
        "Lowest recall before local training: class 2 (50.0 % of 2 examples), class 0 (75.0 % of "
        "4 examples)."
    )
    assert "class c (50.0 %" in class_figures.sentence(confusion, ["a", "b", "c"])
    picture = class_figures.draw(confusion, ["a", "b", "c"])
    axes = picture.figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["75", "25", "50", "50"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "a: 75 %",
        "b: none",
        "c: 50 %",
    ]
    assert "over the clients in the mean scores, before local training." in picture.caption
    assert "Classes without test examples: 1." in picture.caption
    trained = class_figures.draw(confusion | {"after": [[4, 0, 0], [0, 0, 0], [0, 1, 1]]})
    first, second = trained.figure.axes
    assert (first.get_title(), second.get_title()) == (
        "before local training",
        "after local training",
    )
    assert [text.get_text() for text in second.texts] == ["100", "50", "50"]
    assert "mean scores, before and after local training." in trained.caption


def test_nothing_to_draw():
    for confusion in ({}, {"classes": 2}, {"classes": 1, "before": [[0]]}):
        assert class_figures.draw(confusion) is None
        assert class_figures.sentence(confusion) == ""
