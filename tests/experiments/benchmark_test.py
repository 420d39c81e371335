"""Tests of the benchmark: operation counts, the protocol with rivals, and the command.

Only the test of a child that hangs depends on the time that something takes.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

from experiments import benchmark
from experiments.libraries import layouts, rivals, work
from experiments.libraries.rivals import Child, Gone
from experiments.libraries.work import Work
from fedjax_pfl.core import local_training
from fedjax_pfl.networks import MLP, DropoutCNN, LeNet, ResNet9
from tests.commands import Flags, message
from tests.experiments.turns_test import item

pytestmark = pytest.mark.slow("programs of the workloads")

NO_TORCH = "NOT TESTED: PyTorch is not installed, so the PyTorch loop cannot run"
TINY = Work("MLP, tiny", network="mlp", clients=3, cohort=2, examples=8, epochs=2, batch=4)
SLOW = pytest.mark.slow("the benchmark's programs")

# Costs of a step, and use of the machine by other processes.


def test_busy_cores_excludes_this_process(monkeypatch):
    """150 of 200 ticks are idle on 4 cores, so one core is busy."""
    monkeypatch.setattr(work.os, "cpu_count", lambda: 4)
    ticks = iter([(1000, 2000), (1150, 2200)])
    monkeypatch.setattr(work, "_ticks", lambda: next(ticks))
    assert work.busy_cores(0.0) == 1.0
    monkeypatch.setattr(work, "_ticks", lambda: (0, 0))
    assert work.busy_cores(0.0) is None


def test_flops_of_networks():
    """Two operations per multiply-add; three products per layer, two in the first layer."""
    conv1, conv2 = 28 * 28 * 16 * (5 * 5 * 3), 10 * 10 * 32 * (5 * 5 * 16)
    dense = 800 * 120 + 120 * 84 + 84 * 10
    assert work.flops(LeNet()) == 2 * (2 * conv1 + 3 * (conv2 + dense)) == 12_084_720
    assert work.flops(MLP()) == 2 * (2 * 3072 * 200 + 3 * 2000)
    conv1, conv2 = 30 * 30 * 32 * 27, 28 * 28 * 64 * 288
    assert work.flops(DropoutCNN()) == 2 * (2 * conv1 + 3 * (conv2 + 12544 * 128 + 1280))


def test_client_steps_of_workloads():
    steps = [work.WORKS[f"lenet-{n}"].client_steps for n in (10, 100, 1000)]
    assert steps == [200, 2000, 20000]
    assert work.WORKS["pfedhn"].client_steps == 2500
    assert work.WORKS["simulation"].client_steps == 250
    assert TINY.client_steps == 2 * 2 * 2
    spec = json.loads(json.dumps(TINY.spec(5)))
    assert (spec["client_steps"], spec["parameters"], spec["batch"]) == (8, 5, 4)


# The protocol.


def child(tmp_path, code, limit=20.0):
    """Starts a child that runs `code`."""
    script = tmp_path / "fake.py"
    script.write_text("import sys, json, time\n" + textwrap.dedent(code))
    return Child([sys.executable, str(script)], {"n": 3}, limit)


COUNTING_CHILD = """
    print(json.dumps({"ready": json.loads(sys.argv[1])}), flush=True)
    for n, line in enumerate(sys.stdin, 1):
        print(json.dumps({"seconds": n / 4}), flush=True)
"""


def test_a_child_answers_every_request(tmp_path):
    process = child(tmp_path, COUNTING_CHILD)
    assert process.wait_until_ready() == {"n": 3}
    assert [process.go(), process.go()] == [0.25, 0.5]
    process.close()
    process.close()
    assert process._process.returncode is not None


def wait_and_go(process):
    process.wait_until_ready()
    process.go()


READY = "print('{\"ready\": {}}', flush=True)\n"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("print(json.dumps({'lacks': 'it needs h5py'}))", "it needs h5py"),
        ("print('Hello')", "it does not speak the protocol"),
        ("print('[1]')", "it does not speak the protocol"),
        ("raise ValueError('two\\nlines')", "it ended with status 1: lines"),
        ("sys.exit(3)", "it ended with status 3: no message"),
        (f"{READY}next(sys.stdin); raise OSError('full')", "it ended with status 1: OSError: full"),
        (f"{READY}next(sys.stdin); print('{{}}')", "it does not speak the protocol"),
        (f"{READY}print('{{\"seconds\": null}}')", "it does not speak the protocol"),
        (READY, "it ended with status 0: no message"),
    ],
)
def test_a_child_that_fails(tmp_path, code, line):
    process = child(tmp_path, code)
    with pytest.raises(Gone) as caught:
        wait_and_go(process)
    assert str(caught.value) == line
    assert process._process.returncode is not None


def test_a_child_that_hangs_is_killed(tmp_path):
    process = child(tmp_path, "time.sleep(600)", limit=0.5)
    with pytest.raises(Gone, match=r"^no answer in 0.5 s; --limit gives it longer$"):
        process.wait_until_ready()
    assert process._process.returncode is not None


def test_adapter_prints_and_missing_imports(tmp_path):
    """Printed text does not disturb the protocol; a failed import is reported with its name."""
    (tmp_path / "child.py").write_text((rivals.ADAPTERS / "child.py").read_text())
    adapter = """
        import child
        def prepare(spec):
            print("noise")
            if spec["n"] != 3:
                raise child.Lacks("n")
            return {"n": spec["n"]}, lambda: print("more noise") or 1.5
        child.serve(prepare)
    """
    process = child(tmp_path, adapter)
    assert (process.wait_until_ready(), process.go()) == ({"n": 3}, 1.5)
    process.close()
    with pytest.raises(Gone, match=r"it cannot be imported by .*: No module named 'nothing_such'"):
        child(tmp_path, adapter.replace('print("noise")', "import nothing_such")).wait_until_ready()
    lacks = adapter.replace(
        'print("noise")', 'child.checkout({"checkout": "."}, "json", "no_a", "no_b")'
    )
    with pytest.raises(Gone, match=r"it needs no_a, no_b, which .* has not"):
        child(tmp_path, lacks).wait_until_ready()


# The command.


def test_errors_are_one_line(tmp_path):
    assert "'lenet'; did you mean lenet-10?" in message(
        benchmark.select_workloads, ["mlp", "lenet"]
    )
    assert benchmark.select_workloads(["compile", "mlp"]) == ["mlp", "compile"]
    layout_items = ["layouts-lenet", "layouts-resnet9", "layouts-mlp"]
    assert benchmark.select_workloads([]) == [
        *work.WORKS,
        *layout_items,
        *benchmark.PROFILES,
        "compile",
    ]
    line = message(rivals.checkout, "pfedhn", str(tmp_path))
    assert line.endswith("is no checkout of AvivSham/pFedHN: no experiments/pfedhn/trainer.py")
    assert message(rivals.python, "fedjax_python", "no/python") == (
        "--fedjax_python=no/python is no program"
    )
    assert rivals.python("fedjax_python", None) == sys.executable


WITH = {"note": "", "versions": {"jax": "1"}, "commit": "abc"}


def test_read_earlier_measurements(tmp_path):
    path = tmp_path / "out.json"
    assert benchmark.read_earlier(str(path)) == {}
    assert "name the file" in message(benchmark.read_earlier, None)
    results = {
        "items": {"mlp": {"clients": 1, **WITH}},
        "compile_seconds": {"pfedla": 1.0},
        "compile": {**WITH, "cores_of_others": [0.5, 0.5]},
        "layouts": {"lenet": {"clients": 2, **WITH}},
        "profiles": {"mlp": {"launches": 3, **WITH}},
    }
    path.write_text(json.dumps({**results, "machine": work.machine()}))
    assert benchmark.read_earlier(str(path)) == results
    # Older files have one note and one commit for all items.
    old = {"items": {"mlp": {"clients": 1}}, "compile_seconds": {}, "machine": work.machine()}
    path.write_text(json.dumps({**old, **WITH}))
    assert benchmark.read_earlier(str(path))["items"] == results["items"]
    path.write_text(json.dumps({**results, "machine": {"cores": 10**6}}))
    assert "was measured on another machine" in message(benchmark.read_earlier, str(path))
    for wrong in ([], results, {**results, "items": [1], "machine": {}}, {**results, "items": 1}):
        path.write_text(json.dumps(wrong))
        assert message(benchmark.read_earlier, str(path)) == (
            f"--add: {path} is no measurement of this command"
        )


def test_conditions_differ_between_items():
    machine = {"backend": "cpu", "cores": 2, "kind": "A"}
    old = {"date": "2000-01-01", "repeats": 3, **WITH}

    def results(**items):
        return {"machine": machine, "items": items, "compile_seconds": {}}

    same_note = results(mlp={**old, "note": "busy"}, pfedla={**old, "note": "busy"})
    beginning = "2 cores A, 2000-01-01, 3 turns each"
    assert benchmark.conditions(same_note) == f"{beginning}; busy"
    new = old | {"note": "quiet", "versions": {"jax": "2"}, "commit": "def"}
    mixed = results(mlp=old, pfedla=new)
    assert benchmark.conditions(mixed) == (
        f"{beginning}; quiet (pfedla); commit abc (mlp); commit def (pfedla); jax 1 (mlp); "
        "jax 2 (pfedla)"
    )
    with_layouts = {**results(mlp=old), "layouts": {"lenet": new}}
    assert "; quiet (layouts-lenet); commit abc (mlp); commit def (layouts-lenet)" in (
        benchmark.conditions(with_layouts)
    )
    compiled = {**results(mlp=old), "compile_seconds": {"pfedla": 1.0}, "compile": new}
    assert "; quiet (compile); commit abc (mlp); commit def" in benchmark.conditions(compiled)


def test_added_results_keep_their_conditions(tmp_path, monkeypatch, capsys):
    """Runs the command with fixed results instead of measurements."""
    path, measured = tmp_path / "out.json", {**item(), "date": "2000-01-01", "repeats": 3}
    old = {
        "machine": work.machine(),
        "compile_seconds": {},
        "compile": {},
        "items": {"mlp": {**measured, **WITH, "note": "old"}},
    }
    path.write_text(json.dumps(old))
    flag_values = Flags(
        work=["lenet-10", "layouts-mlp"],
        device=None,
        list=False,
        repeats=3,
        limit=1.0,
        torch=False,
        out=str(path),
        add=True,
        picture=str(tmp_path / "out.png"),
        note="new",
    )
    monkeypatch.setattr(benchmark.flags, "FLAGS", flag_values)
    monkeypatch.setattr(benchmark, "prepare_devices", lambda: None)
    monkeypatch.setattr(benchmark, "measured", lambda *_, **__: dict(measured))
    keys = ("ms_per_client_step", "times_the_first")
    monkeypatch.setattr(layouts, "measured", lambda *of: {key: {str(of[:3]): 2.0} for key in keys})
    monkeypatch.setattr(benchmark.jax.config, "update", lambda *_: None)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    benchmark.main(["benchmark"])
    written = json.loads(path.read_text())
    items, layout_times = written["items"], written["layouts"]["mlp"]
    times = {str(("mlp", layouts.SIZES["mlp"], 3)): 2.0}
    assert layout_times["ms_per_client_step"] == times
    assert layout_times.items() >= benchmark.provenance("new").items()
    assert items["mlp"] == old["items"]["mlp"]
    assert items["lenet-10"] == {**measured, **benchmark.provenance("new")}
    out = capsys.readouterr().out
    assert "new (lenet-10, layouts-mlp); old (mlp); commit " in out
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_every_rival_is_listed_with_its_items():
    text = benchmark.listing()
    for rival in (rivals.TORCH, *rivals.RIVALS.values()):
        assert rival.name in text
        assert set(rival.items) <= set(work.WORKS)
        assert (rivals.ADAPTERS / rival.script).is_file()


def test_command_with_an_unknown_workload():
    command = [sys.executable, "-m", "experiments.benchmark", "--work=nothing"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.splitlines()[-1].startswith("error: --work has 'nothing'; there are ")


@SLOW
def test_results_of_a_workload_with_an_unavailable_rival(monkeypatch, capsys, tmp_path):
    """The counts are those of the settings, and the report has the reason of the missing rival."""
    monkeypatch.setattr(work, "peak", lambda: 1e9)
    monkeypatch.setattr(work, "busy_cores", lambda: 0.5)
    monkeypatch.setattr(work, "forget_peak", lambda: print("forgotten"))
    script = tmp_path / "fake.py"
    script.write_text("""print('{"lacks": "a GPU"}')""")
    commands = {"fl_bench": ([sys.executable, str(script)], None)}
    results = benchmark.measured("mlp", TINY, commands, repeats=3, limit=60.0)
    assert results["parameters"] == work.parameters(MLP()) == 3072 * 200 + 200 + 2010
    assert (results["client_steps"], results["missing"]) == (8, {"fl_bench": "a GPU"})
    assert len(results["who"]["library"]["all_seconds"]) == 3
    assert results["cores_of_others"] == [0.5, 0.5]
    assert capsys.readouterr() == ("forgotten\n", "mlp: FL-bench was not timed: a GPU\n")
    record = {
        "items": {"mlp": {**results, "date": "2000-01-01"}},
        "compile_seconds": {"pfedla": 3.0},
        "layouts": {"mlp": layouts.measured("mlp", layouts.Size(2, 1, ("patches",)), 1)},
        "note": "busy",
        "machine": work.machine(),
    }
    text = benchmark.report(json.loads(json.dumps(record)))
    assert "nothing kept: pfedla 3.0 s." in text
    assert "mlp: products in bfloat16" in text
    assert text.endswith("2000-01-01, 3 turns each; busy")


@pytest.fixture
def steps(monkeypatch):
    """Records the rows and the mask of every gradient step that a compiled program takes."""
    batches, take_repeating = [], local_training.take_repeating

    def recording_take(data, rows, mask):
        jax.debug.callback(lambda *batch: batches.append(batch), rows, mask)
        return take_repeating(data, rows, mask)

    monkeypatch.setattr(local_training, "take_repeating", recording_take)
    return batches


HYPER = Work(
    "",
    clients=4,
    cohort=1,
    examples=6,
    local_steps=2,
    batch=3,
    rounds=5,
    network="small",
    algorithm="pfedhn",
    settings={"momentum": 0.9},
)


@pytest.mark.parametrize(
    "tiny",
    [
        pytest.param(TINY, id="epochs"),
        pytest.param(HYPER, id="steps", marks=SLOW),
        pytest.param(TINY._replace(seeds=2), id="seeds", marks=SLOW),
    ],
)
def test_our_runs_do_the_declared_steps(tiny, steps):
    """Counts the gradient steps and their examples at run time; each turn runs further rounds."""
    settings = {**tiny.settings, "devices": 1}  # with more devices the callback would block
    workload, rows_seen = work.compiled(tiny._replace(settings=settings)), set()
    for _ in range(6 if tiny is TINY else 2):
        steps.clear()
        workload.run()
        jax.effects_barrier()
        assert len(steps) == tiny.client_steps
        for rows, mask in steps:
            assert mask.tolist() == [True] * tiny.batch
            rows_seen |= set(rows.tolist())
    if tiny is TINY:  # six turns sample every client, and an epoch takes all its examples
        assert len(rows_seen) == tiny.clients * tiny.examples


# The PyTorch loop.


@pytest.mark.parametrize("name", ["lenet", "mlp", "resnet9", "dropout_cnn"])
def test_pytorch_networks_have_the_same_size(name, monkeypatch):
    pytest.importorskip("torch", reason=NO_TORCH)
    monkeypatch.syspath_prepend(str(rivals.ADAPTERS))
    from networks import NETWORKS  # as the adapters import it

    rival_network = NETWORKS[name]()
    network = {"lenet": LeNet, "mlp": MLP, "resnet9": ResNet9, "dropout_cnn": DropoutCNN}[name]()
    assert sum(p.numel() for p in rival_network.parameters()) == work.parameters(network)


def test_pytorch_loop_does_the_declared_steps():
    """The loop counts its steps with hooks and refuses work with another number of steps."""
    pytest.importorskip("torch", reason=NO_TORCH)
    command = [sys.executable, str(rivals.ADAPTERS / "torch_loop.py")]
    size = work.parameters(MLP())
    process = Child(command, TINY.spec(size), 60.0)
    about = process.wait_until_ready()
    assert (about["parameters"], about["client_steps"], about["batch"]) == (size, 8, 4)
    assert process.go() > 0
    process.close()
    with pytest.raises(Gone, match=r"its work is another: .* where 9 steps of 4 on 616610 are"):
        Child(command, {**TINY.spec(size), "client_steps": 9}, 60.0).wait_until_ready()


def test_adapters_do_not_import_the_project():
    """A checkout may have a package `experiments`, which must not be hidden by this one."""
    for rival in rivals.RIVALS.values():
        text = Path(rivals.ADAPTERS, rival.script).read_text()
        assert "fedjax_pfl" not in text
        assert "child.checkout(spec" in text
