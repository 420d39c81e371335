"""Tests of reports of synthetic runs."""

import html
import html.parser
import json
import math
import re
import shutil

import pytest
from matplotlib.figure import Figure

from fedjax_pfl.report import page as report
from fedjax_pfl.report import references, run_reader
from fedjax_pfl.report.numbers import format_bytes
from fedjax_pfl.report.run_reader import OWN_FIGURES, Run
from tests.report.comparison_test import settings, write_run

pytestmark = pytest.mark.slow("pages of whole runs")

CONFIG = {
    "algorithm": "fedavg",
    "dataset": "digits",
    "partition": "classes",
    "clients": 4,
    "rounds": 10,
    "seed": 0,
    "fedavg": {"weighted": True},
}
TRAFFIC = {
    "down": {"conv1": 400, "fc": 800},
    "up": {"fc": 800},
    "total_down": 1200,
    "total_up": 800,
}
FIGURES = {"answer", "score_rounds", "score_bytes", "train_loss", "clients", "traffic"}


def stage_scores(mean, score="accuracy"):
    spread = {"mean": mean, "weighted": mean + 0.01, "std": 0.05, "worst10": mean - 0.1}
    return {f"{score}_{key}": value for key, value in spread.items()} | {"loss": 0.25}


def evaluation(t, before=0.5, after=0.75, score="accuracy", **changes):
    return {
        "round": t,
        "phase": 0,
        "seconds": 1.5 * t,
        "evaluate_seconds": 0.5 * t,
        "compile_seconds": 4.0,
        "train_loss": 1 / t,
        "before": stage_scores(before, score),
        "after": None if after is None else stage_scores(after, score),
        "validation": stage_scores(before, score),
        "bytes_down": 1200 * t,
        "bytes_up": 800 * t,
        "dropped": 0,
        "rejected": 0,
        "best_round": t,
    } | changes


def make_run(path, metrics, config=CONFIG, traffic=TRAFFIC, clients=4, score="accuracy"):
    """Returns the record of a finished run."""
    after = metrics[-1]["after"]
    rows = [
        {
            "client": i,
            "active": int(i > 0),
            "group": 0,
            "train_examples": 10 * (i + 1),
            "test_examples": 5,
            f"before_{score}": 0.5 + 0.1 * (i % 4),
            "before_loss": 0.4,
            f"after_{score}": 0.9 if after else None,
            "after_loss": 0.2 if after else None,
            "bytes_down": 300,
            "bytes_up": 200,
            "dropped": 0,
            "rejected": 0,
        }
        for i in range(clients)
    ]
    return Run(path, config, metrics, rows, traffic)


def page_of(path, metrics, **changes):
    """Returns the HTML of a finished run's report."""
    return report.write(make_run(path, metrics, **changes)).read_text()


def names(directory):
    return {path.stem for path in (directory / "figures").glob("*.png")}


class Tags(html.parser.HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_rmse_is_also_relative_to_the_deviation_of_the_targets(tmp_path):
    line = evaluation(2, score="squared_error")
    line["before"]["rmse_mean"] = line["after"]["rmse_mean"] = 0.7
    run = make_run(tmp_path, [line], score="squared_error")

    def headline():
        page = html.unescape(report.write(run).read_text())
        return page.partition('class="cards"')[2].partition("</dl>")[0]

    for damaged in ("[", '{"score_deviation": "x"}', '{"score_deviation": 0}'):
        (tmp_path / "data.json").write_text(damaged)
        assert "deviation" not in headline()
    (tmp_path / "data.json").write_text('{"score_deviation": 2.0}')
    text = (
        "rmse 0.7, 0.35 of the targets' standard deviation, which is the rmse of predicting "
        "their mean"
    )
    assert headline().count(text) == 2


@pytest.mark.parametrize("evaluations", [1, 50])
def test_writes_every_figure_and_a_self_contained_page(tmp_path, evaluations):
    metrics = [evaluation(t) for t in range(1, evaluations + 1)]
    path = report.write(make_run(tmp_path, metrics))
    assert path == tmp_path / "report.html"
    assert names(tmp_path) == FIGURES
    for image in (tmp_path / "figures").glob("*.png"):
        assert image.read_bytes().startswith(b"\x89PNG")
        assert image.stat().st_size > 5000
    page = path.read_text()
    tags = Tags(page).tags
    figures = [attributes for tag, attributes in tags if tag == "svg"]
    assert len(figures) == len(FIGURES)
    assert all(a["role"] == "img" and a["aria-label"] for a in figures)
    assert not any({"srcset", "action", "src"} & attributes.keys() for _, attributes in tags)
    assert all(a.get("href", "#").startswith("#") for _, a in tags)  # on the page
    assert not {tag for tag, _ in tags} & {"script", "link", "iframe", "metadata", "img"}
    assert "http" not in page
    assert all(target == "#" for target in re.findall(r"url\((.)", page))
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))
    # Figures use the page's colours, which adapt to dark mode.
    assert "var(--ink)" in page
    svgs = page[page.index("<svg") : page.rindex("</svg>")].lower()
    assert not re.search("#(333333|000000|ffffff|0072b2)", svgs)
    assert 'class="warning"' not in page


def test_wide_figures_take_the_width_of_the_page(tmp_path):
    extra = {name: Figure(figsize=(9, 3)) for name in ("panels", "single")}
    extra["panels"].subplots(1, 4)
    page = report.write(make_run(tmp_path, [evaluation(1)]), extra).read_text()
    (block,) = page.split('<figure class="broad">')[1:]
    assert "Panels." in block.partition("</figure>")[0]


def test_headline_has_last_and_best(tmp_path):
    metrics = [
        evaluation(5, 0.6, 0.8),
        evaluation(10, 0.55, 0.7, best_round=5, checkpoint_seconds=7.25, dropped=3, rejected=1234),
    ]
    page = page_of(tmp_path, metrics)
    for expected in ("55.00 %", "70.00 %", "best round 5: 60.00\xa0%", "best round 5: 80.00\xa0%"):
        assert expected in page
    for expected in ("20 kB", "12 kB down", "8 kB up", "15.0 s"):
        assert expected in page
    assert (
        "5.0 s of them to evaluate</span><span>and 4.0 s to compile, 7.2 s for checkpoints" in page
    )
    assert page.count('class="warning"') == 2
    assert "1,234" in page
    assert "<h1>FedAvg on digits</h1>" in page
    assert '<p class="facts">FedAvg, the method of McMahan et al. 2017 · ' in page
    assert "<dt>fedavg.weighted</dt><dd>true</dd>" in page
    # Cells have their heads for narrow screens.
    cells = [a["data-head"] for tag, a in Tags(page).tags if tag == "td" and a]
    assert cells[:5] == ["mean", "weighted", "std", "worst 10 %", "loss"]
    assert "td::before { content: attr(data-head)" in page


def test_extra_figures_are_saved_and_embedded(tmp_path):
    labelled, unlabelled = Figure(), Figure()
    labelled.add_subplot().plot([1, 2])
    labelled.set_label('Classes & "clients".')
    extra = {"partition": labelled, "two words/..": unlabelled}
    page = report.write(make_run(tmp_path, [evaluation(1)]), extra).read_text()
    assert names(tmp_path) == FIGURES | {"partition", "two_words_.."}
    assert 'Classes & "clients".' in {a["aria-label"] for tag, a in Tags(page).tags if tag == "svg"}
    assert "Classes &amp; &quot;clients&quot;." in page
    assert "Two words." in page
    assert page.count("<figure>") == len(FIGURES) + 2


def test_simulated_time_is_in_the_page_and_the_table(tmp_path):
    metrics = [evaluation(t, simulated_seconds=2.5 * t, late=t) for t in (1, 2)]
    page = page_of(tmp_path, metrics)
    assert names(tmp_path) == FIGURES | {"score_seconds"} <= OWN_FIGURES
    assert "The run lasts 5 simulated seconds." in page
    assert "rounds   5.0 s simulated, 2 updates late" in report.table(metrics)


def test_a_run_without_local_evaluation_and_traffic(tmp_path):
    metrics = [
        evaluation(t, after=None, bytes_down=0, bytes_up=0, evaluate_seconds=None) for t in (1, 2)
    ]
    for line in metrics:
        line["validation"] = line["best_round"] = None
    page = page_of(tmp_path, metrics, traffic={"down": {}, "up": {}})
    assert names(tmp_path) == FIGURES - {"answer", "score_bytes", "traffic"}
    assert "before local training" in page
    assert "after local training" not in page
    assert "There is no best round, as it is chosen on validation examples." in page
    assert "to evaluate" not in page  # not recorded by an old run
    text = report.table(metrics)
    assert "after" not in text
    assert "seconds  3.0, and 4.0 to compile" in text


def test_the_page_has_the_rounds_at_which_a_callback_ended_the_run(tmp_path):
    phases = CONFIG | {"phases": [{"rounds": 2}, {}]}
    for config, last, text in ((CONFIG, 10, "10"), (CONFIG, 4, "4 of 10"), (phases, 4, "4 of 12")):
        page = page_of(tmp_path, [evaluation(last)], config=config)
        assert f" · {text} rounds · " in page


def test_a_score_that_is_not_an_accuracy(tmp_path):
    score = "negative_loss"
    metrics = [evaluation(t, -1.25, -1.0, score) for t in (1, 2)]
    page = page_of(tmp_path, metrics, score=score)
    assert names(tmp_path) == FIGURES
    assert "Negative loss before local training" in page
    assert "-1.25" in page
    assert "Accuracy" not in page
    assert "-1.25" in report.table(metrics)


def test_values_that_were_not_finite(tmp_path):
    blank = dict.fromkeys(stage_scores(0.5)) | {"clients": 0, "not_finite": 4}
    metrics = [evaluation(t, train_loss=None) for t in (1, 2, 3)]
    metrics[1]["after"] = blank
    metrics[2] |= {"before": blank, "validation": blank, "best_round": None, "phase": 1}
    metrics[2]["attack_success"] = {"before": None, "after": 0.25}
    page = page_of(tmp_path, metrics)
    assert names(tmp_path) == FIGURES - {"train_loss"}
    assert "Clients whose final evaluation is not finite: 4; means are over the 0 others." in page
    assert "as no evaluation of the last phase has finite validation scores of all clients" in page
    assert "Success of the backdoor, before local training: –." in page
    assert "Success of the backdoor, after local training: 25.0%." in page
    assert not re.search(r"\b(nan|None)\b", re.sub(r'src="data:[^"]*"', "", page))
    text = report.table(metrics)
    assert "–" in text
    assert "best" not in text


def test_many_clients_and_layers_with_hostile_names(tmp_path):
    hostile = '"><script>alert(1)</script>'
    layers = {f"a/long/path/to/the/layer/number/{i}": 10**i for i in range(40)}
    traffic = {"down": {hostile: 1, **layers}, "up": {"$x_{$": 1, **layers}}
    config = CONFIG | {"dataset": hostile, hostile: hostile, "nested": {hostile: [hostile]}}
    metrics = [evaluation(1), evaluation(2, phase=1)]
    page = page_of(tmp_path, metrics, config=config, traffic=traffic, clients=300)
    assert names(tmp_path) == FIGURES
    assert "<script" not in page
    assert html.escape(hostile) in page


def test_table():
    last = evaluation(10, 0.55, 0.7, best_round=5, dropped=2, checkpoint_seconds=7.25)
    metrics = [evaluation(5, 0.6, 0.8), last]
    assert report.table(metrics).splitlines() == [
        "accuracy (%)             mean  weighted   std  worst 10 %    loss",
        "last, round 10  before  55.00     56.00  5.00       45.00  0.2500",
        "                after   70.00     71.00  5.00       60.00  0.2500",
        "best, round 5   before  60.00     61.00  5.00       50.00  0.2500",
        "                after   80.00     81.00  5.00       70.00  0.2500",
        "bytes    12 kB down, 8 kB up",
        "seconds  15.0, 5.0 of them to evaluate, and 4.0 to compile, 7.2 for checkpoints",
        "clients  2 dropped out, 0 rejected",
    ]


def test_table_has_at_most_100_columns():
    metrics = [evaluation(10**7 + i, -1e30, -1e30, "negative_squared_error") for i in (0, 1)]
    metrics[1] |= {"best_round": 10**7, "bytes_down": 10**17}
    assert max(map(len, report.table(metrics).splitlines())) <= 100


def test_format_bytes():
    expected = {
        0: "0 B",
        999: "999 B",
        1000: "1 kB",
        1234: "1.23 kB",
        999_499: "999 kB",
        999_999: "1 MB",
        18_250_000_000: "18.2 GB",
        2**62: "4,611.686 PB",
        None: "–",
        math.nan: "–",
    }
    assert {n: format_bytes(n) for n in expected} == expected


# Comparison with reference runs, changed settings and provenance.


def work(method, **changes):
    return settings(method, clients=4, rounds=10, **changes)


def test_report_compares_with_reference_runs_on_the_same_data(tmp_path):
    """The gains over FedAvg are 0.1, 0.2, 0.2 and 0.3, so p = 2/2^4; Local is 0.05 better."""
    scores = [0.5, 0.6, 0.6, 0.7]
    write_run(tmp_path / "a", [0.4] * 4, work("fedavg"))
    better = [score + 0.05 for score in scores]
    write_run(tmp_path / "run" / "reference" / "local", better, work("local"))
    for name, value in {"seed": 1, "partition_seed": 1, "model": "mlp"}.items():
        write_run(tmp_path / name, scores, work("local", **{name: value}))
    (write_run(tmp_path / "going on", scores, work("local")) / "report.html").unlink()
    (write_run(tmp_path / "damaged", scores, work("local")) / "clients.csv").write_text("x")
    write_run(tmp_path / "run2", scores, work("pfedla")).rename(tmp_path / "run" / "own")
    run = run_reader.read(tmp_path / "run" / "own")._replace(directory=tmp_path / "run")
    assert list(references.find(run)) == ["FedAvg", "Local"]
    unknown = run._replace(examples=None)
    assert references.find(unknown) == references.same_work(unknown, [unknown]) == {}
    page = report.write(run).read_text()
    text = html.unescape(page)
    assert (
        "As served it is 20.00 points better than FedAvg (60.00 % against 40.00 %; better for 4 "
        "of 4 clients, p = 0.1250)."
    ) in text
    assert "it is 5.00 points worse than Local (60.00 % against 65.00 %; better for 0 of 4" in text
    assert "<p>Not clearly. As served it is 5.00 points worse than Local" in text  # the better one
    assert "Gain of each client over Local: 0 better, 4 worse, 0 equal." in text
    assert page.count(">FedAvg</text>") == page.count(">Local</text>") == 2  # of the two curves
    assert "also differ" not in page
    (tmp_path / "a" / "config.json").write_text(json.dumps(work("fedavg", learning_rate=0.5)))
    text = html.unescape(report.write(run).read_text())
    assert text.count("The two runs also differ in learning_rate.") == 1  # in the list
    longer = run._replace(metrics=[*run.metrics, {**run.metrics[-1], "round": 20}])
    assert references.training_differences(run, longer) == ["rounds"]
    assert references.training_differences(run._replace(metrics=[]), run) == ["rounds"]
    assert references.comparable(run, {"FedAvg": longer}) == {}
    shutil.rmtree(tmp_path / "run" / "reference")  # the only reference run has other settings
    text = html.unescape(report.write(run).read_text())
    assert "that of FedAvg (a) differs in learning_rate. The setting reference=true" in text
    assert not re.search(r"<p>(Yes|No|Not clearly)\. ", text)
    assert "Gain of each client by local training" in text
    assert "(60.00 % against 40.00 %" in text
    assert "FedAvg" not in references.comparable(run, references.find(run))


def test_without_reference_runs_the_page_says_how_to_add_them(tmp_path):
    run = run_reader.read(write_run(tmp_path / "run", [0.6] * 4, work("pfedla")))
    assert "The setting reference=true runs both" in report.write(run).read_text()
    local = run_reader.read(write_run(tmp_path / "x" / "local", [0.6] * 4, work("local")))
    assert "Did it help" not in report.write(local).read_text()


def test_page_shows_changed_settings_and_provenance(tmp_path):
    provenance = {"started": "2026-01-02 03:04 UTC", "command": "python -m experiments.x --a='<b>'"}
    run = make_run(tmp_path, [evaluation(1)], work("fedavg", learning_rate=0.25))
    run = run._replace(provenance=provenance)
    page = report.write(run).read_text()
    parts = ["local training help?", "<h2>Results", "<h2>Clients", "Settings that were changed"]
    assert sorted(parts, key=page.index) == parts
    changed, _, unchanged = page.partition("Settings at their defaults")
    changed = changed[changed.index("Settings that were changed") :]
    assert "<dt>learning_rate</dt><dd>0.25</dd>" in changed
    assert "batch_size" not in changed
    assert "<dt>batch_size</dt><dd>32</dd>" in unchanged
    assert '<abbr title="over clients; every client counts the same">mean</abbr>' in page
    assert "2026-01-02 03:04 UTC" in page
    assert "--a=&#x27;&lt;b&gt;&#x27;" in page


def test_clients_have_the_names_of_their_owners(tmp_path):
    row = {"active": 1, "train_examples": 5, "test_examples": 2, "before_accuracy": 0.5}
    clients = [
        {"client": 0, "owner": "Bern <b>", **row},
        {"client": 1, "owner": "Aix", **row, "before_accuracy": 0.25},
        {"client": 2, "owner": "Cairo", **row, "before_accuracy": None},
        {"client": 3, "owner": "Delhi", **row, "test_examples": 0, "before_accuracy": None},
    ]
    run = make_run(tmp_path, [evaluation(1)])._replace(clients=clients)
    page = report.write(run).read_text()
    table = page[page.index('<details class="clients">') :].partition("</details>")[0]
    heads = re.findall(r'<th scope="row">(.*?)</th>', table)
    assert heads == ["Cairo", "Aix", "Bern &lt;b&gt;"]  # a missing score is the worst
    assert "Clients: all 3" in table
    assert ">Aix</text>" in page  # below its bar
    unnamed = [{k: v for k, v in client.items() if k != "owner"} for client in clients * 20]
    page = report.write(run._replace(clients=unnamed)).read_text()
    assert "Clients: the 50 worst of 60" in page
