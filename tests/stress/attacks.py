"""What somebody may do to a run directory or hand to a run: python -m tests.stress.attacks

A file of each kind in a finished run's directory is damaged in each of many ways, and every command
that reads it is given the result. Arrays, names and checkpoints that no run makes are handed over
besides. Each has to end in one line, or in what an undamaged run gives. A text file whose damage is
still what a run could have written is taken as it stands: only checkpoints have digests.
"""

import argparse
import contextlib
import io
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import fedjax_pfl
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import comparison, comparison_page, page, references, run_reader
from fedjax_pfl.report.run_index import Known
from fedjax_pfl.runs import export, run_directory, runner
from fedjax_pfl.settings import configuration
from tests.stress.common import Row, copied, digest, finish, one_line, progress, scratch, untimed
from tests.stress.damages import OTHERS, TEXTS, damaged

CONFIG: dict[str, Any] = {
    "algorithm": "fedmn",  # which observes something
    "dataset": "synthetic",
    "synthetic": {"shape": (2, 2, 1), "classes": 3, "examples": 60, "test_examples": 0},
    "partition": "iid",
    "validation_fraction": 0.2,
    "model": "mlp",
    "fedmn": {"layout": (2, 2), "width": 4, "hidden": 4, "x_size": 3, "y_size": 2},
    "clients": 3,
    "rounds": 4,
    "eval_every": 2,
    "checkpoint_every": 2,
    "tensorboard": True,
    "devices": 1,
}


def _outcome(work: Callable[[], Any]) -> tuple[str, Any]:
    """What came of it (done, one line, or what is wrong), and what it gave."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            given = work()
        except UsageError as error:
            return ("line" if one_line(str(error)) else f"not one line: {error}"), None
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300], None
    return ("a traceback is said" if "Traceback" in said.getvalue() else "done"), given


class Program:
    """A configuration that is compiled once, whatever is done to the directories of its runs."""

    def __init__(self, place: Path, config: dict[str, Any]) -> None:
        self.config, self.built = config, dict[str, Any]()
        self.make = runner.build
        with self.kept():
            self.result = runner.run(config, place)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """`build` gives what it has built of the same settings."""

        def once(*points: Any, **how: Any) -> Any:
            key = "".join(one.to_json() for one in points)
            self.built[key] = self.built.get(key) or self.make(*points, **how)
            return self.built[key]

        with mock.patch.object(runner, "build", once), mock.patch.object(export, "build", once):
            yield

    def same(self, result: Any) -> bool:
        """Whether a run that went on ended as the undamaged one did."""
        wanted, got = self.result, result
        return digest(got.state, got.best) == digest(wanted.state, wanted.best) and (
            got.clients == wanted.clients
        )


def _commands(program: Program, there: Path, beside: Path) -> dict[str, Callable[[], Any]]:
    """What can be done with a directory; each gives whether its result is right."""

    def again() -> bool:
        done = program.same(runner.run(program.config, there))
        return done and len(untimed(there)) == 2

    def compared() -> bool:
        rows = comparison.group([comparison.read(there), comparison.read(beside)])
        return bool(comparison_page.text(rows)) and bool(comparison_page.as_csv(rows))

    def reported() -> bool:
        run = run_reader.read(there)
        near = mock.patch.object(references, "_near", return_value=[beside])
        with near, run_directory.writing(there):  # as a run does
            return page.write(run).is_file()

    def exported() -> bool:
        return digest(export.restored(there).state) == digest(program.result.state)

    def found() -> bool:
        other = run_reader.read(beside)
        references.find(other._replace(directory=there / "none"))
        return len(Known(there.parent).runs) >= 1

    return {
        "the same call": again,
        "compare": compared,
        "report": reported,
        "export": exported,
        "found beside": found,
    }


def kinds(directory: Path) -> dict[str, Path]:
    """A file of each kind that a run's directory has; what Orbax names by a digest is of one kind,
    and so are the figures, and what either of two checkpoints has under the same name."""
    found = {}
    newest = max((p.name for p in (directory / "checkpoints").iterdir()), key=int)
    for path in sorted(directory.rglob("*")):
        if not path.is_file():
            continue
        inner = path.relative_to(directory)
        name = re.sub(r"/[0-9a-f]{32}$", "/DIGEST", inner.as_posix())
        if inner.parts[0] == "checkpoints" and inner.parts[1] != newest:
            name = "checkpoints/before/" + inner.parts[2]
        elif inner.parts[0] in ("figures", "tensorboard"):
            name = f"{inner.parts[0]}/{path.suffix if inner.parts[0] == 'figures' else ''}"
        found[name] = path
    return found


# Of these, what reads a checkpoint; the others do not open the folder.
READERS = ("the same call", "export")


def directory(seed: int = 0, share: float = 1.0, only: Sequence[str] = ()) -> list[Row]:
    """A file of each kind in a run directory, each damage, each command that reads it.

    only: names of files, where it is not all.
    """
    rng = np.random.default_rng(seed)
    rows = []
    with scratch() as place:
        program = Program(place / "runs" / "good", CONFIG)
        good = place / "runs" / "good"
        other = copied(good, place / "runs" / "other")
        text = (other / "config.json").read_text().replace('"seed": 0', '"seed": 1')
        (other / "config.json").write_text(text)
        for path in (p for p in kinds(good).values() if not only or p.name in only):
            inner = path.relative_to(good)
            in_checkpoint = inner.parts[0] == "checkpoints"
            ended = dict.fromkeys(("line", "done"), 0)
            lost = 0
            for kind in (*TEXTS, *OTHERS):
                for name in READERS if in_checkpoint else _commands(program, good, other):
                    if rng.random() > share:
                        continue
                    there = copied(good, place / "runs" / "there")
                    victim = there / inner
                    if kind == "another file's content" and path.parent != good:
                        shutil.copy(there / "config.json", victim)
                    else:
                        damaged(kind, victim, rng)
                    with program.kept():
                        outcome, right = _outcome(_commands(program, there, other)[name])
                    fine = outcome == "line" or (outcome == "done" and right)
                    ended[outcome] = ended.get(outcome, 0) + 1
                    lost += not fine
                    progress(f"{path.name}: {kind}, {name}")
                    if not fine:
                        print(f"{inner}, {kind}, {name}: {outcome} {right}")
            tried = sum(ended.values())
            shown = "/".join(inner.parts[:2]) if in_checkpoint else inner
            shown = "tensorboard" if inner.parts[0] == "tensorboard" else shown
            note = f"{ended['line']} refused in a line, {ended['done']} went on"
            rows.append(Row(f"{shown} damaged", tried, tried - lost, lost, note))
    return _together(rows)


def _together(rows: list[Row]) -> list[Row]:
    """Those of several files of a checkpoint as one."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.kind, []).append(row)
    return [
        each[0]
        if len(each) == 1
        else Row(
            kind,
            *(sum(r[i] for r in each) for i in (1, 2, 3)),
            f"a file of each of {len(each)} kinds",
        )
        for kind, each in found.items()
    ]


def refusals(kind: str, works: dict[str, Callable[[], Any]]) -> Row:
    """Each has to be refused in one line."""
    lost = 0
    for name, work in works.items():
        outcome, given = _outcome(work)
        if outcome != "line":
            lost += 1
            print(f"{kind}, {name}: {outcome} {given}")
        progress(f"{kind}: {name}")
    return Row(kind, len(works), len(works) - lost, lost, "each refused in a line")


def _own(x: Any, y: Any, given: Any = None, **more: Any) -> Callable[[], Any]:
    settings = {"partition": "iid", "clients": 2, "rounds": 1, "model": "mlp", **(given or {})}
    return lambda: fedjax_pfl.run(settings, dataset=fedjax_pfl.arrays(x, y, **more))


def arrays() -> list[Row]:
    """Examples and labels that nobody can learn from."""
    x, y = np.zeros((8, 3), np.float32), np.arange(8) % 2
    holes = np.where(np.arange(8) == 3, np.nan, 1.0)
    ragged = np.array([[1, 2], [3]], object)
    natural = {"partition": "natural"}
    works = {
        "none": _own(None, None),
        "empty": _own(x[:0], y[:0]),
        "0-d": _own(1.0, 1),
        "no features": _own(x[:, :0], y),
        "flat": _own(x[:, 0], y),
        "longer": _own(x, y[:7]),
        "NaN": _own(x * holes[:, None], y),
        "infinite": _own(x + np.inf, y),
        "NaN label": _own(x, holes),
        "text": _own(x.astype(str), y),
        "objects": _own(ragged, y[:2]),
        "complex": _own(x * 1j, y),
        "negative label": _own(x, y - 1),
        "far labels": _own(x, y * 2_000_000_000),
        "sparse labels": _own(x, y * 1_000_000),
        "labels out of range": _own(x, y * 4, outputs=2),
        "no outputs": _own(x, y, outputs=0),
        "outputs of text": _own(x, y, outputs="two"),
        "3-d labels": _own(x, y.reshape(2, 2, 2)),
        "boolean times": _own(x, y.astype("datetime64[s]")),
        "test only half": _own(x, y, x_test=x),
        "test of another shape": _own(x, y, x_test=x[:, :2], y_test=y),
        "owners too few": _own(x, y, natural, owners=y[:3]),
        "owners of reals": _own(x, y, natural, owners=y + 0.5),
        "owners below 0": _own(x, y, natural, owners=y - 1),
        "owners that nobody reads": _own(x, y, owners=y),
        "owner_classes of another shape": _own(x, y, natural, owners=y, owner_classes=x),
        "coarse of another length": _own(x, y, coarse=np.zeros(5, int)),
        "a billion clients": _own(x, y, {"clients": 10**9}),
        "no clients": _own(x, y, {"clients": 0}),
        "more clients than owners": _own(x, y, natural | {"clients": 3}, owners=y),
        "hidden of 0": _own(x, y, {"mlp": {"hidden": (0,)}}),
        "a network for images": _own(x, y, {"model": "lenet"}),
    }
    with np.errstate(all="ignore"):
        return [refusals("hostile arrays", works)]


def evil(model: Any, training: Any, federation: Any) -> Any:
    """A method whose observation would be a file elsewhere."""
    made = configuration.ALGORITHMS["fedavg"](model, training, federation)
    return made._replace(observe=lambda state: {"../evil": np.zeros(1)})


def names() -> list[Row]:
    """Names of examples, owners, observations, settings and directories."""
    x, y = np.zeros((8, 3), np.float32), np.arange(8) % 2
    natural = {"partition": "natural"}

    def owner(name):
        return _own(x, y, natural, owners=np.array([name, "b"] * 4))

    def called(name):
        return _own(x, y, name=name)

    def settings(given):
        return lambda: fedjax_pfl.run(given)

    observing = {k: v for k, v in CONFIG.items() if k not in ("algorithm", "fedmn")}
    with scratch() as place:
        (place / "file").write_text("mine")
        works = {
            **{
                f"examples called {n!r}": called(n)
                for n in ("", "a b", "../x", "digits", "rounds", "a.b", "é\n", "class-1")
            },
            **{f"owner {n!r}": owner(n) for n in ("", " ", "a\nb", "a\x00b", "\x1b[2J", "a" * 81)},
            "observe ../evil": lambda: fedjax_pfl.run(observing, algorithm=evil),
            "a setting of another type": settings({1: 2}),
            "a list": settings([]),
            "a setting that is not there": settings({"round": 3}),
            "a dotted setting": settings({"pfedla.rate": 1}),
            "a method that is not there": settings({"algorithm": "../fedavg"}),
            "a data set that is not there": settings({"dataset": "/etc/passwd"}),
            "a folder of data that is not there": settings(
                {"dataset": "mnist", "data_dir": "\x00"}
            ),
            "a directory that is a file": lambda: fedjax_pfl.run(CONFIG, place / "file"),
            "a directory below a file": lambda: fedjax_pfl.run(CONFIG, place / "file" / "run"),
            "a directory with a zero byte": lambda: fedjax_pfl.run(CONFIG, place / "a\x00b"),
            "a directory of a long name": lambda: fedjax_pfl.run(CONFIG, place / ("a" * 300)),
            "a run beside that is none": lambda: fedjax_pfl.run(
                {**CONFIG, "beside": "/dev/null"}, place / "run"
            ),
        }
        return [refusals("hostile names", works)]


FOREIGN: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "rate": {"learning_rate": 0.05},
    "batches": {"batch_size": 16},
    "split": {"partition_seed": 1},
    "method": {"algorithm": "fedavg", "fedmn": {}},
    "method's own": {"fedmn": {**CONFIG["fedmn"], "layout": (1, 2)}},
    "rounds": {"rounds": 2},
    "drop of the rate": {"learning_rate_drops": (0.5,)},
    "who is missing": {"dropout": 0.5},
}


def foreign() -> list[Row]:
    """Checkpoints of a run with other settings, copied into a run's directory."""
    with scratch() as place:
        good = place / "good"
        program = Program(good, CONFIG)
        works = {}
        for name, changes in FOREIGN.items():
            donor = copied(good, place / f"from {name}")
            config = {**CONFIG, **changes}
            if not changes.get("fedmn", True):
                config.pop("fedmn")
            _relabelled(donor, config)
            there = copied(good, place / f"to {name}")
            (there / "report.html").unlink()
            shutil.rmtree(there / "checkpoints")
            shutil.copytree(donor / "checkpoints", there / "checkpoints")
            works[name] = lambda there=there: runner.run(CONFIG, there)
        with program.kept():
            return [refusals("foreign checkpoint", works)]


def _relabelled(donor: Path, config: dict[str, Any]) -> None:
    """A run's directory made anew as that of another configuration, which is really run."""
    shutil.rmtree(donor)
    runner.run(config, donor)


def attacks(share: float = 1.0, seed: int = 0) -> list[Row]:
    """Files by damages by commands; arrays; names; checkpoints."""
    return [*directory(seed, share), *arrays(), *names(), *foreign()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    finish(attacks(given.share, given.seed))
