"""Whether a method helped: runs of Local and FedAvg on the same work, and what they say.

The same work is the same examples on the same clients, the same seed and the same network. Such a
run is looked for beside a run, and in its folder `reference`, where the setting of this name puts
them.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import comparison, method_labels, run_reader
from fedjax_pfl.report.comparison import Paired, Row
from fedjax_pfl.report.html_page import flat
from fedjax_pfl.report.numbers import metric_of, number, show_score
from fedjax_pfl.report.run_reader import Run
from fedjax_pfl.settings.configuration import Registry
from fedjax_pfl.settings.general import settings_with

METHODS = {name: method_labels.row(name) for name in ("fedavg", "local")}
FOLDER = "reference"  # within a run directory
_MOST = 2000  # directories that are looked into
_NAMED = 4  # settings in a sentence


def row(run: Run) -> Row:
    """A run, as what is compared."""
    return Row(str(run.config.get("algorithm")), run.config, [run])


def work(config: Mapping[str, Any]) -> list[Any]:
    """What two runs have in common that are compared with each other."""
    network = [config.get("model"), config.get(str(config.get("model"))), config.get("groups")]
    return [*comparison.problem(config), config.get("seed"), network]


def given(directories: str) -> list[Run]:
    """Finished runs, whose directories are separated by commas; UsageError where one is none."""
    found = []
    for word in filter(None, map(str.strip, directories.split(","))):
        run = comparison.read(Path(word))
        if not run.finished:
            raise UsageError(f"{word} holds a run that is not finished; give its command again")
        found.append(run)
    return found


def check(configs: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> None:
    """UsageError for a run that does the work of none of the configurations."""
    known = run_reader.known_settings()
    each = [comparison.common(one, known) | {"seed": one.get("seed")} for one in configs]
    for run in runs:
        theirs = comparison.common(run.config, known) | {"seed": run.config.get("seed")}
        if any(work(ours) == work(theirs) for ours in each):
            continue
        ours = each[0]
        kinds = [kind for kind in Registry._fields if kind != "algorithm"]
        decide = {*settings_with("defines_data"), *kinds, "groups", "seed"}
        decide |= {str(ours.get(kind)) for kind in kinds}
        apart = [k for k in different(ours, theirs) if k.split(".")[0] in decide]
        raise UsageError(
            f"{run.directory} is a run of other work, which differs in "
            f"{', '.join(apart[:_NAMED])}; it cannot be set beside this one"
        )


def same_work(run: Run, others: Sequence[Run]) -> dict[str, Run]:
    """Those that can be set beside a run, by the names of their methods."""
    return {
        method_labels.row(str(other.config.get("algorithm"))): other
        for other in others
        if work(other.config) == work(run.config) and other.examples == run.examples
    }


def find(run: Run) -> dict[str, Run]:
    """Finished runs of the same work by FedAvg and by Local, by their names.

    Of several the one that has most settings in common, and of those the first by name.
    """
    known = run_reader.known_settings()
    ours = comparison.common(run.config, known)
    best: dict[str, tuple[int, Run]] = {}
    for path in _near(run.directory):
        try:
            config = run_reader.read_config(path)
            method = str(config.get("algorithm"))
            if method not in METHODS or method == run.config.get("algorithm"):
                continue
            whole = comparison.common(config, known) | {"seed": config.get("seed")}
            if whole.get("phases") or work(whole) != work(ours | {"seed": run.config.get("seed")}):
                continue
            other = comparison.read(path)
        except UsageError:
            continue  # damaged, or nothing to compare yet
        apart = len(different(ours, whole))
        if other.examples != run.examples:
            continue
        if other.finished and (method not in best or apart < best[method][0]):
            best[method] = apart, other
    return {METHODS[method]: best[method][1] for method in METHODS if method in best}


def _near(directory: Path) -> Iterator[Path]:
    """Run directories in the folder `reference`, and beside this one, with theirs."""
    count = 0
    for pattern, folder in (
        (f"{FOLDER}/*/config.json", directory),
        ("*/config.json", directory.parent),
        (f"*/{FOLDER}/*/config.json", directory.parent),
    ):
        for path in sorted(folder.glob(pattern)):
            if path.parent.resolve() != directory.resolve():
                yield path.parent
                count += 1
            if count >= _MOST:
                return


def different(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Settings of both in which they differ, but for the method and what it alone has."""
    one, other = dict(flat(ours)), dict(flat(theirs))
    shared = [key for key in one if key in other and key not in ("algorithm", "phases")]
    return [key for key in shared if one[key] != other[key]]


def sentence(run: Run, name: str, other: Run) -> str:
    """How a run compares with one of another method, before and after local training."""
    said = [_stage(run, name, other, stage, when) for stage, when in _STAGES]
    known = run_reader.known_settings()
    ours, theirs = (comparison.common(one.config, known) for one in (run, other))
    apart = different(ours, theirs)
    note = ""
    if apart:
        more = f" and {len(apart) - _NAMED} more" if len(apart) > _NAMED else ""
        note = f" The two runs also differ in {', '.join(apart[:_NAMED])}{more}."
    return f"{' '.join(filter(None, said))}{note}"


_STAGES = (("before", "As served"), ("after", "After one more local training"))


def _stage(run: Run, name: str, other: Run, stage: str, when: str) -> str:
    metric = metric_of(run.metrics)
    mine, theirs = (
        number((one.metrics[-1].get(stage) or {}).get(f"{metric.name}_mean"))
        for one in (run, other)
    )
    if not (mine == mine and theirs == theirs):  # NaN: not scored, or not finite
        return ""
    gain = (mine - theirs) * (1 if metric.higher_is_better else -1)
    size = f"{100 * abs(gain):.2f} points" if metric.unit == "%" else f"{abs(gain):.4g}"
    word = f"{size} better than" if gain > 0 else f"{size} worse than" if gain else "as good as"
    both = f"{show_score(metric, mine)} against {show_score(metric, theirs)}"
    found = comparison.paired(row(run), row(other), stage)
    test = ""
    if isinstance(found, Paired):
        up = comparison.better_clients(row(run), row(other), stage)
        p = f"{found.p:.4f}" if found.p >= 1e-4 else f"{found.p:.1e}"
        test = f"; better for {up} of {found.pairs} clients, p = {p}"
    return f"{when} it is {word} {name} ({both}{test})."
