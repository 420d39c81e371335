"""Tests of texts as tokens, and of the network that classifies them."""

import gzip
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import trees
from fedjax_pfl.data import load
from fedjax_pfl.networks import FastText
from tests import commands
from tests.commands import message

TOPICS = ("war peace treaty", "match goal team", "stock bank profit", "chip code robot")


def write_news(folder, rows=160):
    """Writes train.csv and test.csv like those of AG News: class, title and text, no header."""
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for part, n in (("train", rows), ("test", rows // 4)):
        lines = []
        for i in range(n):
            words = TOPICS[i % 4].split()
            text = " ".join([*rng.choice(words, 4), *rng.choice(["the", "a", "of"], 4)])
            lines.append(f'"{i % 4 + 1}","{rng.choice(words).title()}, ""{i}""","{text}"\n')
        (folder / f"{part}.csv").write_text("".join(lines))
    return f"csv:{folder / 'train.csv'}"


@pytest.mark.parametrize(
    "content",
    [
        "1\tGo, go, now\n0\tstay\n",
        "1\tgo, now\n0\tstay, now\n",
        "\n1;go, now, then\n0;stay\n",
        '1,"go; now; then"\n0,stay\n',
    ],
)
def test_texts_without_a_header_may_have_other_separators(tmp_path, content):
    (tmp_path / "a.csv").write_text(content)
    options = {"columns": "label,text", "tokens": "words"}
    dataset = load(f"csv:{tmp_path / 'a.csv'}", **options)
    assert dataset.metadata["classes"] == ["0", "1"]
    assert {"go", "now", "stay"} <= set(dataset.metadata["tokens"])


def test_words_and_bytes_of_columns(tmp_path):
    (tmp_path / "a.csv").write_text('2,"Go, go",now\n1,é,\n')
    (tmp_path / "b.csv").write_text("1,away away go,now\n")
    options = {"columns": "label,title,text", "test": str(tmp_path / "b.csv"), "length": 4}
    dataset = load(f"csv:{tmp_path / 'a.csv'}", **options, tokens="words", words=5)
    # "go" twice; then , now é once, of which the vocabulary has the first two in order
    assert dataset.metadata["tokens"] == ["", "?", ",", "go", "now"]
    assert dataset.x_train.tolist() == [[3, 2, 3, 4], [1, 0, 0, 0]]
    assert dataset.x_test.tolist() == [[1, 1, 3, 4]]  # the test set adds no words
    assert (dataset.y_train.tolist(), dataset.metadata["classes"]) == ([1, 0], ["1", "2"])
    assert (dataset.x_train.dtype, dataset.outputs, dataset.normalise) == (np.int32, 2, None)
    dataset = load(f"csv:{tmp_path / 'a.csv'}", **options, tokens="bytes", input="title")
    tokens = dataset.metadata["tokens"]
    assert [tokens[i] for i in dataset.x_train[1]] == ["\xc3", "\xa9", "", ""]


def test_json_lines_with_owners(tmp_path):
    reviews = [{"rating": 5.0, "text": "good", "user_id": "u1"}, {"rating": 1.0, "text": "bad"}]
    reviews[1]["user_id"] = "u2"
    with gzip.open(tmp_path / "books.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, reviews)))
    options = {"label": "rating", "label_kind": "class", "owner": "user_id", "tokens": "words"}
    dataset = load(f"jsonl:{tmp_path / 'books.jsonl.gz'}", **options, input="text", length=2)
    assert dataset.x_train.tolist() == [[3, 0], [2, 0]]
    assert dataset.owner_names[dataset.owner_train].tolist() == ["u1", "u2"]
    assert (dataset.y_train.tolist(), dataset.metadata["classes"]) == ([1, 0], ["1.0", "5.0"])
    days = [{"day": "2020-01-01", "time": "2020-01-01 10:30", "label": 0}] * 2
    (tmp_path / "days.jsonl").write_text("\n".join(map(json.dumps, days)))
    options = {"label": "label", "input": "day,time", "tokens": "words", "length": 9}
    dataset = load(f"jsonl:{tmp_path / 'days.jsonl'}", **options)
    words = [dataset.metadata["tokens"][i] for i in dataset.x_train[0]]
    assert words == ["2020", "-", "01", "-", "01", "2020", "-", "01", "-"]  # as they are written
    lists = [{"text": ["a", "b"], "label": 0}, {"text": ["b"], "label": 1}]
    (tmp_path / "lists.jsonl").write_text("\n".join(map(json.dumps, lists)))
    options = {"label": "label", "tokens": "words", "length": 2}
    dataset = load(f"jsonl:{tmp_path / 'lists.jsonl'}", **options)
    words = [[dataset.metadata["tokens"][i] for i in row] for row in dataset.x_train]
    assert words == [["a", "b"], ["b", ""]]
    nulls = [{"text": None, "more": [None], "label": 0}, {"text": None, "more": [], "label": 1}]
    (tmp_path / "nulls.jsonl").write_text("\n".join(map(json.dumps, nulls)))
    assert load(f"jsonl:{tmp_path / 'nulls.jsonl'}", **options).x_train.tolist() == [[0, 0]] * 2
    (tmp_path / "nested.jsonl").write_text(json.dumps({"text": {"a": 1}, "label": 0}))
    line = message(lambda: load(f"jsonl:{tmp_path / 'nested.jsonl'}", **options))
    assert "column 'text' has values of type struct<a: int64>, which cannot be read as text" in line
    (tmp_path / "no.jsonl").write_text("{")
    assert "cannot be read as lines of JSON" in message(load, f"jsonl:{tmp_path / 'no.jsonl'}")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tokens": "letters"}, "csv.tokens is 'letters'; choose words or bytes"),
        ({"tokens": "words", "length": 0}, "length=0, words=10000: use 1 or more"),
        ({"tokens": "words", "input": "txt"}, "has no column 'txt', which csv.input names"),
        ({"columns": "label,title"}, "row 1 .* has 3 cells, but there are 2 columns"),
    ],
)
def test_invalid_settings_raise_one_line(tmp_path, options, line):
    name = write_news(tmp_path, 8)
    options = {"columns": "label,title,text", **options}
    assert re.search(line, message(lambda: load(name, **options)))


def test_fasttext_by_hand():
    model = FastText(outputs=3, embedding=2, vocabulary=5)
    x = jnp.array([[2, 4, 0], [0, 0, 0], [1, 1, 1]])
    variables = jax.jit(model.init)(jax.random.key(0), x)
    params = variables["params"]
    assert trees.size(params) == 5 * 2 + 2 * 3 + 3
    assert set(trees.layers(variables)) == set(model.layers)
    embedding, bias = np.asarray(params["embed"]["embedding"]), np.asarray(params["fc1"]["bias"])
    mean = np.stack([(embedding[2] + embedding[4]) / 2, np.zeros(2), embedding[1]])
    expected = mean @ np.asarray(params["fc1"]["kernel"]) + bias
    np.testing.assert_allclose(model.apply(variables, x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow("a run")
@pytest.mark.filterwarnings("ignore:the load_module")  # of ml_collections
def test_text_is_classified(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_news(tmp_path / "ag_news_csv")
    commands.run_here(
        "baseline",
        "--config=baseline:fedavg-n4-iid",
        "--config.dataset=csv:ag_news_csv/train.csv",
        "--config.csv.columns=label,title,text",
        "--config.csv.test=ag_news_csv/test.csv",
        "--config.csv.tokens=words",
        "--config.csv.words=100",
        "--config.model=fasttext",
        "--config.fasttext.vocabulary=100",
        "--config.split=official",
        "--config.learning_rate=1.0",
        "--config.rounds=4",
        "--workdir=run",
    )
    lines = commands.metrics(tmp_path / "run")
    assert lines[-1]["before"]["accuracy_mean"] > 0.9
