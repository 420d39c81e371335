import json
import re
import sys
import types

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedjax_pfl.data import federate, load, take
from tests.commands import message
from tests.data.folders import png

HOUSES = """town,rooms,age,kind,price
Bern,3,10.5,flat,100.5
Bern,4,20.5,house,200.5
Cairo,5,30.5,flat,300.5
Cairo,7,40.5,house,401
Delhi,2,0.5,flat,90
"""


@pytest.fixture
def houses(tmp_path):
    return written(tmp_path / "houses.csv", HOUSES)


def written(path, content):
    """Writes a file and returns its dataset name: CSV from text, Parquet from columns."""
    if isinstance(content, str):
        path.write_text(content)
        return f"csv:{path}"
    parquet.write_table(pa.table(content), path)
    return f"parquet:{path}"


def test_csv_by_hand(houses):
    dataset = load(houses, owner="town", label="price")
    # kind becomes one column for each category, in alphabetical order
    np.testing.assert_array_equal(
        dataset.x_train,
        [[3, 10.5, 1, 0], [4, 20.5, 0, 1], [5, 30.5, 1, 0], [7, 40.5, 0, 1], [2, 0.5, 1, 0]],
    )
    np.testing.assert_array_equal(dataset.y_train, [[100.5], [200.5], [300.5], [401], [90]])
    assert dataset.x_train.dtype == dataset.y_train.dtype == np.float64
    assert dataset.outputs == 1
    np.testing.assert_array_equal(dataset.owner_train, [0, 0, 1, 1, 2])
    assert dataset.owner_names.tolist() == ["Bern", "Cairo", "Delhi"]
    assert dataset.metadata == {
        "label": "price",
        "input": ["rooms", "age", "kind=flat", "kind=house"],
        "categories": {"kind": ["flat", "house"]},
    }
    np.testing.assert_array_equal(dataset.normalise.features, [True, True, False, False])


def test_text_and_integers_are_classes_unless_label_kind_is_number(houses):
    by_text = load(houses, label="kind", input="rooms")
    assert (by_text.y_train.tolist(), by_text.outputs) == ([0, 1, 0, 1, 0], 2)
    assert by_text.metadata["classes"] == ["flat", "house"]
    by_number = load(houses, label="rooms", input="age, kind", categories="index")
    assert by_number.y_train.tolist() == [1, 2, 3, 4, 0]
    assert by_number.x_train[:, 1].tolist() == [0, 1, 0, 1, 0]
    assert load(houses, label="rooms", label_kind="number").y_train.shape == (5, 1)
    only = load(houses, label="price", input="kind,town", categories="index")
    assert only.x_train.dtype == np.int32  # only categories


def test_training_and_test_file_share_categories(houses, tmp_path):
    more = tmp_path / "more.csv"
    more.write_text("price;kind;age;rooms;town\n1;barn;2;3;Oslo\n")
    dataset = load(houses, label="price", test=str(more), owner="town")
    assert dataset.metadata["categories"]["kind"] == ["barn", "flat", "house"]
    np.testing.assert_array_equal(dataset.x_test, [[3, 2, 1, 0, 0]])
    infinite = written(tmp_path / "infinite.csv", "price;kind;age;rooms;town\n1;barn;inf;3;Oslo\n")
    line = message(lambda: load(houses, label="price", test=infinite.removeprefix("csv:")))
    assert line.startswith(f"{infinite}: column 'age' is not finite in 1 rows, the first is row 1")
    assert dataset.owner_names[dataset.owner_test[0]] == "Oslo"


def test_blank_lines_before_the_header_are_skipped(tmp_path):
    for blank in ("\n", " \n\r\n", "\t\n"):
        dataset = load(written(tmp_path / "blank.csv", f"{blank}a,label\n1,x\n\n2,y\n"))
        assert dataset.x_train.tolist() == [[1], [2]]
        assert dataset.metadata["input"] == ["a"]
    assert "columns none and 0 rows" in message(load, written(tmp_path / "no.csv", "\n \n"))


def test_normalisation_uses_training_examples_of_active_clients(houses, tmp_path):
    rows = "".join(f"{'ab'[i % 2]},{i},{7},{10 * i}\n" for i in range(40))
    path = written(tmp_path / "line.csv", f"who,x,same,y\n{rows}")
    dataset = load(path, owner="who", label="y", label_kind="number")
    data, federation = federate(dataset, "natural", clients=2, held_out=1, test_fraction=0.5)
    used = data.train.rows[0, : data.train.size[0]]  # of the only active client
    (mean, _), (deviation, _) = (federation.metadata[f"input_{k}"] for k in ("mean", "deviation"))
    x = data.x[:, 0].astype(np.float64) * deviation + mean
    np.testing.assert_allclose(x, np.round(x), atol=1e-5)  # integers, as in the file
    x_train = np.round(x)[used]
    np.testing.assert_allclose([mean, deviation], [x_train.mean(), x_train.std()], rtol=1e-12)
    np.testing.assert_array_equal(data.x[:, 1], 0)  # all are 7
    np.testing.assert_allclose(data.y[used].mean(), 0, atol=1e-6)
    (mean,), (deviation,) = (federation.metadata[f"target_{k}"] for k in ("mean", "deviation"))
    y = data.y[:, 0] * deviation + mean
    np.testing.assert_allclose(y, 10 * np.round(x), atol=1e-4)


METADATA = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}}}


def arrow():
    """Returns a table with images, classes and lists, as the package datasets stores them."""
    images = [png(np.full((3, 2, 3), 10 * i, np.uint8)) for i in range(4)]
    columns = {
        "image": [{"bytes": content, "path": None} for content in images],
        "label": [0, 1, 1, 0],
        "who": ["b", "a", "b", "a"],
        "ids": [[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 1, 2]],
    }
    return pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(METADATA)})


def save(folder, table):
    """Writes a folder as save_to_disk does."""
    folder.mkdir(parents=True)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    files = [{"filename": "data-00000-of-00001.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    return folder


def test_a_saved_hugging_face_dataset_is_read_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it raises ImportError
    save(tmp_path / "both" / "train", arrow())
    save(tmp_path / "both" / "test", arrow().slice(2))
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    dataset = load(f"hf:{tmp_path / 'both'}", input="image", owner="who")
    assert (dataset.x_train.shape, dataset.x_train.dtype) == ((4, 3, 2, 3), np.uint8)
    assert dataset.x_train[:, 0, 0, 0].tolist() == [0, 10, 20, 30]
    assert dataset.x_test[:, 2, 1, 2].tolist() == [20, 30]
    assert dataset.metadata["classes"] == ["cat", "dog"]
    assert dataset.owner_names[dataset.owner_train].tolist() == ["b", "a", "b", "a"]
    data, _ = federate(dataset, "natural", clients=2, split="official")
    batch = take(data, np.array([3]), np.array([True]))
    np.testing.assert_allclose(batch.x, 30 / 255, rtol=1e-6)
    dataset = load(f"hf:{save(tmp_path / 'one', arrow())}", input="ids")
    assert (dataset.x_train.dtype, dataset.x_test) == (np.int32, None)


def test_a_folder_of_parquet_files_has_train_and_test(tmp_path):
    table = arrow().drop_columns("image")
    for name, rows in {"train-0": table, "train-1": table, "test-0": table.slice(1)}.items():
        parquet.write_table(rows, tmp_path / f"{name}.parquet")
    dataset = load(f"parquet:{tmp_path}", input="ids", owner="who")
    assert (len(dataset.x_train), len(dataset.x_test)) == (8, 3)
    table = table.append_column("next", [[[2, 3, -1], [5, 6, 7], [8, 9, 9], [1, 2, 3]]])
    parquet.write_table(table, tmp_path / "test-0.parquet")
    file = load(f"parquet:{tmp_path / 'test-0.parquet'}", input="ids", label="next")
    assert (file.y_train.shape, file.y_train.dtype, file.outputs) == ((4, 3), np.int32, 10)
    assert len(load(f"hf:{tmp_path}", input="ids").x_test) == 4  # the layout of the hub
    test_folder, rows = tmp_path / "held", {"input": "ids"}
    test_folder.mkdir()
    parquet.write_table(table.slice(2), test_folder / "test-0.parquet")
    train_file = f"parquet:{tmp_path / 'train-0.parquet'}"
    assert len(load(train_file, test=str(test_folder), **rows).x_test) == 2
    assert len(load(train_file, test=str(tmp_path / "test-0.parquet"), **rows).x_test) == 4
    for source in (f"parquet:{tmp_path}", train_file):
        line = message(lambda at=source: load(at, test=at.removeprefix("parquet:"), **rows))
        assert line.startswith("parquet.test names the training examples")
    line = message(lambda: load("hf:mnist", test="train", **rows))
    assert line.startswith("hf.test names the training examples")


def test_hugging_face_names_are_downloaded(monkeypatch):
    requests = []

    class Part:
        def with_format(self, kind):
            assert kind == "arrow"
            return self

        def __getitem__(self, rows):
            assert rows == slice(None)
            return arrow()

    def load_dataset(*arguments):
        requests.append(arguments)
        return {"train": Part(), "test": Part()}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    dataset = load("hf:somebody/cats#small", input="ids")
    assert requests == [("somebody/cats", "small")]
    assert (len(dataset.x_train), len(dataset.x_test), dataset.outputs) == (4, 4, 2)
    line = message(lambda: load("hf:somebody/cats", test="tests"))
    assert "no split tests; it has train, test; did you mean test" in line
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "install it (pip install '.[hf]' in the clone)" in message(load, "hf:somebody/cats")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"label": "prize"}, "no column 'prize', which csv.label names; there are price, "),
        ({"owner": "twon"}, "no column 'twon', which csv.owner .* are town, "),
        ({"input": "rooms,agee"}, "no column 'agee', which csv.input .* are age"),
        ({"input": "price"}, "'price' is both input and label"),
        ({"label_kind": "real"}, "label_kind is 'real'; choose auto, class or"),
        ({"categories": "hot"}, "categories is 'hot'; choose onehot or"),
        ({"normalise": "all"}, "normalise is 'all'; choose federation, client"),
        ({"label": "kind", "label_kind": "number"}, "'kind' is text"),
    ],
)
def test_invalid_column_settings_raise_one_line(houses, settings, line):
    assert re.search(line, message(lambda: load(houses, **{"label": "price", **settings})))


PRICES = "".join(f"1,{i}\n" for i in range(200))
NAMES = "".join(f"n{i},1\n" for i in range(1001))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", "has the columns none and 0 rows"),
        ("a,b\n", "has the columns a, b and 0 rows"),
        ("a,a\n1,2\n", "must name each column differently"),
        ("a,label\n1,2,3\n", "row 1 below the first line has 3 cells, but there are 2 columns"),
        ("a,label\n1,2\n,3\n1,2\n", "'a' has 1 cells that are not numbers, the first '' in row 2"),
        ("a,label\n1,2\nnan,3\n", "'a' is not finite in 1 rows, the first is row 2"),
        ("a,label\n1,x\n2,\n", "'label' has empty cells"),
        ("a\n1\n", "there are a$"),
        ("label\n1\n", "add an input column"),
        (f"a,label\n{PRICES}", "200 different integers"),
        (f"a,label\n{NAMES}", "1,001 different texts"),
        ("a;label\n1,5;2\n2;3\n", "'a' has numbers with commas, the first '1,5' in row 1"),
        ('a,label\n1,2\n2,"1,000"\n', "'label' has numbers with commas, .* '1,000' in row 2"),
        ("a,label\nNA,2\n,3\n1,2\n", "'a' has 2 cells that are not numbers, the first 'NA'"),
        ('a,label\n1,2\n2,"x\n3,2\n4,2\n', "cannot be read .* close or double its quotes"),
        ('a,label\n1,2\n2,"x\n3,2\n4,"y\n', "cannot be read .* close or double its quotes"),
    ],
)
def test_invalid_csv_files_raise_one_line(tmp_path, content, line):
    assert re.search(line, message(load, written(tmp_path / "bad.csv", content)))


def test_owner_names_are_spelled_as_in_the_file(tmp_path):
    def owners(*cells):
        rows = "".join(f"{cell},{i},{i % 2}\n" for i, cell in enumerate(cells))
        dataset = load(written(tmp_path / "owners.csv", f"who,x,label\n{rows}"), owner="who")
        return dataset.owner_names[dataset.owner_train].tolist()

    spelled = ["01", "1", "1_0", "10", "1e5", "100000"]
    assert owners(*spelled) == spelled
    long = ["12345678901234567890123", "12345678901234567890124"]  # equal in 64 bits
    assert owners(*long) == long
    assert owners("1", "2", "3", "X") == ["1", "2", "3", "X"]
    dataset = load(written(tmp_path / "n.csv", "who,x,label\n10,1,a\n9,2,b\n"), owner="who")
    assert dataset.owner_names.tolist() == ["9", "10"]  # in numerical order


def test_codes_with_underscores_are_text(tmp_path):
    dataset = load(written(tmp_path / "codes.csv", "code,label\n1_2,a\n12,b\n1_2,a\n"))
    assert dataset.metadata["input"] == ["code=12", "code=1_2"]


def test_names_and_texts_of_csv_files(tmp_path):
    content = '"x; y; z",label\n1,a\n2,b\n'
    assert load(written(tmp_path / "names.csv", content)).metadata["input"] == ["x; y; z"]
    text = "word " * 40_000  # more than the 131,072 characters that csv allows by default
    content = f'text,label\n"{text}",a\nshort,b\n'
    dataset = load(written(tmp_path / "long.csv", content), tokens="words", length=3)
    assert dataset.x_train.tolist() == [[3, 3, 3], [2, 0, 0]]


def test_text_of_parquet_is_stripped(tmp_path):
    columns = {"x": [1, 2, 3], "label": ["cat", "cat ", "dog"], "who": ["b", " b", "a"]}
    dataset = load(written(tmp_path / "t.parquet", columns), owner="who")
    assert dataset.metadata["classes"] == ["cat", "dog"]
    assert dataset.owner_names.tolist() == ["a", "b"]


def test_parquet_folders_named_test_and_validation(tmp_path):
    for i, part in enumerate(("train", "test", "validation")):
        (tmp_path / part).mkdir()
        written(tmp_path / part / "part-0.parquet", {"x": [i, i], "label": ["a", "b"]})
    for i, file in enumerate(("valid-0", "Dev/0", "val", "Validation_1")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        written(tmp_path / f"{file}.parquet", {"x": [7 + i], "label": ["a"]})
    dataset = load(f"parquet:{tmp_path}")
    assert (dataset.x_train.tolist(), dataset.x_test.tolist()) == ([[0], [0]], [[1], [1]])
    written(tmp_path / "Evaluation.parquet", {"x": [2], "label": ["a"]})
    written(tmp_path / "value.parquet", {"x": [3], "label": ["a"]})  # no word for a split
    dataset = load(f"parquet:{tmp_path}")
    assert dataset.x_train.tolist() == [[0], [0], [3]]
    assert dataset.x_test.tolist() == [[2], [1], [1]]


def class_table(path, names):
    """Writes a Parquet file with an integer column that has class names in its metadata."""
    features = {"pet": {"_type": "ClassLabel", "names": names}}
    table = pa.table({"pet": [0, 1], "x": [1.5, 1.5], "y": ["p", "q"]})
    metadata = json.dumps({"info": {"features": features}})
    return written(path, table.replace_schema_metadata({"huggingface": metadata}))


def test_class_names_become_categories_and_owner_names(tmp_path):
    pets = class_table(tmp_path / "train.parquet", ["dog", "cat"])
    dataset = load(pets, label="y", input="pet")
    assert dataset.metadata["input"] == ["pet=cat", "pet=dog"]
    assert dataset.x_train.tolist() == [[0, 1], [1, 0]]
    assert load(pets, label="y", owner="pet").owner_names.tolist() == ["cat", "dog"]
    class_table(tmp_path / "test.parquet", ["cat", "dog"])
    line = message(lambda: load(f"parquet:{tmp_path}", label="pet", input="x"))
    assert re.search(r"'pet' has other classes in .* \(test\)", line)


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ([{"x": [1], "label": ["a"]}, {"x": ["u"], "label": ["a"]}], "cannot be read: .* type"),
        ([{"x": pa.array([], pa.int64()), "label": pa.array([], pa.string())}], "has no rows"),
        ([{"x": [[1, 2], [3, None]], "label": ["a", "b"]}], "'x' has missing values in its lists"),
        ([{"label": [1, None], "a": [1, 2]}], "'label' has 1 missing values, the first in row 2"),
        ([{"label": [1, 2], "a": [[1], [1, 2]]}], "lists of 1 to 2 values; make them equally long"),
        ([{"x": pa.array([[], []], pa.list_(pa.int64())), "label": [0, 1]}], "only empty lists"),
        ([{"label": pa.array([[], []], pa.list_(pa.int64())), "x": [0, 1]}], "only empty lists"),
    ],
)
def test_invalid_parquet_files_raise_one_line(tmp_path, tables, line):
    for i, columns in enumerate(tables):
        written(tmp_path / f"{i}.parquet", columns)
    assert re.search(line, message(load, f"parquet:{tmp_path}"))


def test_missing_and_damaged_files(tmp_path, houses):
    line = message(load, houses.replace("houses", "hoses"))
    assert re.search(r"no such file or folder; did you mean .*houses\.csv", line)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing else")
    assert "cannot be read" in message(load, f"parquet:{tmp_path / 'bad.parquet'}")
    line = message(load, f"hf:{tmp_path / 'empty'}")
    assert "holds no file that ends with .parquet" in line
    (save(tmp_path / "x", arrow()) / "state.json").write_text("[]")
    assert "cannot be read as a saved dataset" in message(load, f"hf:{tmp_path / 'x'}")
