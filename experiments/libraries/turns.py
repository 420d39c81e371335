"""Who takes turns with us, and what the seconds say: pure but for the clock."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.libraries.rivals import Gone
from fedjax_pfl.report.text_tables import Table


class Turn(NamedTuple):
    """Neighbours in time."""

    ours: float  # seconds
    who: str  # the rival; empty where there is none
    theirs: float | None
    peak: float  # FLOP/s of the machine, just after
    few: float | None = None  # seconds of the same with few clients, just before and after


class Ratio(NamedTuple):
    """Of neighbours."""

    median: float
    low: float
    high: float


def take(
    ours: Callable[[], float],
    rivals: Mapping[str, Callable[[], float]],
    peak: Callable[[], float],
    repeats: int,
    few: Callable[[], float] | None = None,
) -> tuple[list[Turn], dict[str, str]]:
    """A B A B ..., with every rival; and why a rival ended, where one did.

    Args:
      few: the same work of ours with few clients, which a step is compared with.
    """
    turns, gone = [], {}
    for _ in range(repeats):
        for who in [name for name in rivals if name not in gone] or [""]:
            beside = [few()] if few else []
            mine, machine = ours(), peak()  # before a rival's turn, which may take minutes
            beside += [few()] if few else []
            theirs = None
            if who:
                try:
                    theirs = rivals[who]()
                except Gone as error:
                    gone[who] = str(error)
            turns.append(
                Turn(
                    mine,
                    who if theirs is not None else "",
                    theirs,
                    machine,
                    statistics.mean(beside) if beside else None,
                )
            )
    return turns, gone


def faster(turns: Sequence[Turn], who: str) -> Ratio:
    """How many times as long a rival took as we did beside it."""
    ratios = [turn.theirs / turn.ours for turn in turns if turn.who == who and turn.theirs]
    return _ratio(ratios)


def of_peak(turns: Sequence[Turn], operations: float) -> Ratio:
    """The share of the machine's product that our operations reached."""
    return _ratio([operations / turn.ours / turn.peak for turn in turns])


def step_ratio(turns: Sequence[Turn], client_steps: int, few_steps: int) -> Ratio:
    """How many times as long a client step takes as with few clients, beside it."""
    shares = few_steps / client_steps
    return _ratio([turn.ours / turn.few * shares for turn in turns if turn.few])


def _ratio(ratios: Sequence[float]) -> Ratio:
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def summary(turns: Sequence[Turn], client_steps: int, operations: float) -> dict[str, Any]:
    """What JSON and the table show."""

    def one(seconds: Sequence[float], **more: Any) -> dict[str, Any]:
        median = statistics.median(seconds)
        return {
            "seconds": _round(median),
            "ms_per_client_step": _round(1000 * median / client_steps),
            **more,
            "all_seconds": [_round(s) for s in seconds],
        }

    share = [_round(value) for value in of_peak(turns, operations)]
    told = {"ours": one([turn.ours for turn in turns], share_of_peak=share)}
    for who in dict.fromkeys(turn.who for turn in turns if turn.who):
        ratio = faster(turns, who)
        told[who] = one(
            [turn.theirs for turn in turns if turn.who == who and turn.theirs],
            times_faster=_round(ratio.median),
            range=[_round(ratio.low), _round(ratio.high)],
        )
    return told


def _round(value: float) -> float:
    """To four digits."""
    return float(f"{value:.4g}")


HEADS = ["seconds", "ms a client step", "we are faster", "range", "compile (s)", "of peak"]


def table(results: Mapping[str, Any], names: Mapping[str, str]) -> Table:
    """A row for each item and who did it.

    Args:
      results: by item, as `experiments.benchmark` writes them.
      names: what rivals are called.
    """
    rows = []
    for item in results.values():
        for who, found in item["who"].items():
            label = f"{item['about']}: {'ours' if who == 'ours' else names.get(who, who)}"
            times = found.get("times_faster")
            low, high = found.get("range", (0, 0))
            rows.append(
                [
                    label,
                    f"{found['seconds']:.3g}",
                    f"{found['ms_per_client_step']:.3g}",
                    "" if times is None else f"{times:.2f} x",
                    "" if times is None else f"{low:.2f} to {high:.2f}",
                    f"{item['compile_seconds']:.1f}" if who == "ours" else "",
                    f"{100 * found['share_of_peak'][0]:.0f} %" if who == "ours" else "",
                ]
            )
    return Table(
        "The same work in turn: medians, and medians of the ratios of neighbours.", HEADS, rows
    )


def constant(results: Mapping[str, Any]) -> str:
    """How the time of a client step changes with the number of clients, each beside few."""
    said = [
        f"{found[0]:.2f} times ({found[1]:.2f} to {found[2]:.2f}) with {_of_many(item)}"
        for item in results.values()
        if (found := item.get("step_beside_few"))
    ]
    if not said:
        return ""
    few = results.get("lenet-10", {"clients": 10})["clients"]
    return f"Beside a client step of LeNet with {few} clients, one takes {', '.join(said)}."


def _of_many(item: Mapping[str, Any]) -> str:
    if (seeds := item.get("seeds", 1)) > 1:
        return f"{seeds} seeds at once"
    return f"{item['clients']:,} clients"


# By backend: item, rival and how many times faster we are to be.
TARGETS = {
    "cpu": [("lenet-10", "torch", 1.5), ("mlp", "torch", 1.5), ("resnet9", "torch", 1.2),
            ("lenet-100", "torch", 1.0), ("lenet-1000", "torch", 1.0),
            ("simulation", "torch", 1.0)],
    "gpu": [("lenet-10", "torch", 10.0), ("lenet-100", "torch", 30.0),
            ("pfedla", "fl_bench", 10.0), ("pfedhn", "pfedhn", 10.0)],
}  # fmt: skip
_APART, _COMPILE = 0.10, 15.0
_OTHERS = 0.25  # of the cores: what others may use while we measure


def busy(item: Mapping[str, Any], cores: float) -> bool:
    """Whether others were using the machine before or after an item."""
    others = [used for used in item.get("cores_of_others", ()) if used is not None]
    if others:
        return max(others) > _OTHERS * cores
    return bool(item.get("load_average", [0])[0] > cores)


def targets(whole: Mapping[str, Any], names: Mapping[str, str]) -> Table:
    """Which targets for its backend a measurement meets, misses, or says nothing of.

    On a busy machine it says nothing of any.
    """
    rows = []
    cores = whole["machine"].get("cores", math.inf)

    def row(target: str, found: str, met: bool | None, where: Mapping[str, Any] = {}) -> None:
        if met is not None and busy(where, cores):
            found, met = f"{found}, busy machine", None
        verdict = "not measured" if met is None else "met" if met else "missed"
        rows.append([target, found, verdict])

    backend = whole["machine"]["backend"]
    for item, who, times in TARGETS.get(backend, ()):
        here = whole["items"].get(item, {})
        ratio = here.get("who", {}).get(who, {}).get("times_faster")
        row(
            f"{backend.upper()}, {item}: {times:g} x {names[who]}",
            "" if ratio is None else f"{ratio:.2f} x",
            None if ratio is None else ratio >= times,
            here,
        )
    many = whole["items"].get("lenet-1000", {})
    most = many.get("step_beside_few")
    apart = abs(most[0] - 1) if most else None
    row(
        f"a client step as long with 1,000 clients as with 10, within {100 * _APART:.0f} %",
        "" if apart is None else f"{100 * apart:.0f} % apart",
        None if apart is None else apart <= _APART,
        many,
    )
    for name in ("pfedla", "pfedhn", "fedmn", "factorized_fl"):
        took = whole["compile_seconds"].get(name)
        row(
            f"the default configuration of {name} compiled in {_COMPILE:g} s",
            "" if took is None else f"{took:.1f} s",
            None if took is None else took < _COMPILE,
            whole.get("compile", {}),
        )
    return Table("Targets, and what was found.", ["found", ""], rows)


def curve(results: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """ms of a client step of LeNet by number of clients, for everybody.

    Ours with few clients is a median of times. All other points are that, times ratios of
    neighbours: they do not show how busy the machine was in which minute.
    """
    points: dict[str, dict[int, float]] = {}
    few = results.get("lenet-10")
    for name, item in sorted(results.items(), key=lambda pair: int(pair[1]["clients"])):
        if not name.startswith("lenet-"):
            continue
        ours = item["who"]["ours"]["ms_per_client_step"]
        if few and (ratio := item.get("step_beside_few")):
            ours = few["who"]["ours"]["ms_per_client_step"] * ratio[0]
        for who, found in item["who"].items():
            times = 1.0 if who == "ours" else found["times_faster"]
            points.setdefault(who, {})[item["clients"]] = _round(ours * times)
    return points
