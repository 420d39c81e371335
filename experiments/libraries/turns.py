"""Timed turns of the library and its rivals, and the ratios that follow from them."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.libraries.rivals import Gone
from fedjax_pfl.report.text_tables import Table


class Turn(NamedTuple):
    """One timing of the library, and of a rival right after it."""

    seconds: float  # of the library
    rival: str  # name of the rival; "" if there is none
    rival_seconds: float | None
    peak: float  # FLOP/s of the machine, right after
    few: float | None = None  # seconds with few clients, mean of right before and right after


class Ratio(NamedTuple):
    """Median and range of ratios of neighbouring timings."""

    median: float
    low: float
    high: float


def take(
    library: Callable[[], float],
    rivals: Mapping[str, Callable[[], float]],
    peak: Callable[[], float],
    repeats: int,
    few: Callable[[], float] | None = None,
) -> tuple[list[Turn], dict[str, str]]:
    """Times the library and every rival in turn: A B A B ...

    Each function runs its library once and returns seconds; `few` is this library with few
    clients, `peak` returns the FLOP/s that the machine reaches now. Returns the turns, and for each
    rival that failed the reason.
    """
    turns, failures = [], {}
    for _ in range(repeats):
        for rival in [name for name in rivals if name not in failures] or [""]:
            few_seconds = [few()] if few else []
            library_seconds, peak_now = (
                library(),
                peak(),
            )  # before a rival's turn, which may take minutes
            few_seconds += [few()] if few else []
            rival_seconds = None
            if rival:
                try:
                    rival_seconds = rivals[rival]()
                except Gone as error:
                    failures[rival] = str(error)
            turns.append(
                Turn(
                    seconds=library_seconds,
                    rival=rival if rival_seconds is not None else "",
                    rival_seconds=rival_seconds,
                    peak=peak_now,
                    few=statistics.mean(few_seconds) if few_seconds else None,
                )
            )
    return turns, failures


def faster(turns: Sequence[Turn], rival: str) -> Ratio:
    """Returns seconds of a rival divided by seconds of the library in the same turn."""
    ratios = [
        turn.rival_seconds / turn.seconds
        for turn in turns
        if turn.rival == rival and turn.rival_seconds
    ]
    return _ratio(ratios)


def of_peak(turns: Sequence[Turn], operations: float) -> Ratio:
    """Returns the fraction of the machine's peak that the library reached."""
    return _ratio([operations / turn.seconds / turn.peak for turn in turns])


def step_ratio(turns: Sequence[Turn], client_steps: int, few_steps: int) -> Ratio:
    """Returns the time of a client step divided by that with few clients in the same turn."""
    scale = few_steps / client_steps
    return _ratio([turn.seconds / turn.few * scale for turn in turns if turn.few])


def _ratio(ratios: Sequence[float]) -> Ratio:
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def summary(turns: Sequence[Turn], client_steps: int, operations: float) -> dict[str, Any]:
    """Returns seconds, ratios and fractions by name, as the JSON file holds them."""

    def entry(seconds: Sequence[float], **facts: Any) -> dict[str, Any]:
        median = statistics.median(seconds)
        return {
            "seconds": _round(median),
            "ms_per_client_step": _round(1000 * median / client_steps),
            **facts,
            "all_seconds": [_round(s) for s in seconds],
        }

    share = [_round(value) for value in of_peak(turns, operations)]
    entries = {"library": entry([turn.seconds for turn in turns], share_of_peak=share)}
    for rival in dict.fromkeys(turn.rival for turn in turns if turn.rival):
        ratio = faster(turns, rival)
        entries[rival] = entry(
            [turn.rival_seconds for turn in turns if turn.rival == rival and turn.rival_seconds],
            times_faster=_round(ratio.median),
            range=[_round(ratio.low), _round(ratio.high)],
        )
    return entries


def _round(value: float) -> float:
    """Rounds to four digits."""
    return float(f"{value:.4g}")


HEADS = ["seconds", "ms per client step", "speedup", "range", "compile (s)", "of peak"]


def table(results: Mapping[str, Any], names: Mapping[str, str]) -> Table:
    """Returns a table with a row for each workload and library; `names` are the rivals' titles."""
    rows = []
    for item in results.values():
        for name, entry in item["who"].items():
            label = f"{item['about']}: {'ours' if name == 'library' else names.get(name, name)}"
            times = entry.get("times_faster")
            low, high = entry.get("range", (0, 0))
            rows.append(
                [
                    label,
                    f"{entry['seconds']:.3g}",
                    f"{entry['ms_per_client_step']:.3g}",
                    "" if times is None else f"{times:.2f} x",
                    "" if times is None else f"{low:.2f} to {high:.2f}",
                    f"{item['compile_seconds']:.1f}" if name == "library" else "",
                    f"{100 * entry['share_of_peak'][0]:.0f} %" if name == "library" else "",
                ]
            )
    return Table("Median times, and median ratios of neighbouring turns (speedup).", HEADS, rows)


def constant(results: Mapping[str, Any]) -> str:
    """Returns a sentence on how the time of a client step depends on the number of clients."""
    parts = [
        f"{ratio[0]:.2f} times ({ratio[1]:.2f} to {ratio[2]:.2f}) with {_size(item)}"
        for item in results.values()
        if (ratio := item.get("step_ratio"))
    ]
    if not parts:
        return ""
    few = results.get("lenet-10", {"clients": 10})["clients"]
    return f"Beside a client step of LeNet with {few} clients, one takes {', '.join(parts)}."


def _size(item: Mapping[str, Any]) -> str:
    if (seeds := item.get("seeds", 1)) > 1:
        return f"{seeds} seeds at once"
    return f"{item['clients']:,} clients"


# By backend: workload, rival and factor by which the library should be faster.
TARGETS = {
    "cpu": [("lenet-10", "torch", 3.0), ("mlp", "torch", 2.5), ("resnet9", "torch", 1.6),
            ("simulation", "torch", 2.5), ("pfedhn", "pfedhn", 2.0), ("pfedla", "fl_bench", 2.5)],
    "gpu": [("pfedla", "fl_bench", 10.0), ("pfedhn", "pfedhn", 10.0)],
}  # fmt: skip
# By backend: workload and most microseconds of a client step.
MICROSECONDS = {"gpu": [("lenet-100", 12.0), ("lenet-10", 50.0), ("mlp", 6.0)]}
# By backend: workload and least part of the peak.
SHARES = {"gpu": [("resnet9", 0.3)]}
_STEP_TOLERANCE, _COMPILE_SECONDS = 0.10, 5.0
_MOST_OTHERS = 0.25  # fraction of the cores that other processes may use


def busy(item: Mapping[str, Any], cores: float) -> bool:
    """Returns True if other processes used the machine before or after a workload."""
    cores_used = [count for count in item.get("cores_of_others", ()) if count is not None]
    if cores_used:
        return max(cores_used) > _MOST_OTHERS * cores
    return bool(item.get("load_average", [0])[0] > cores)


def targets(results: Mapping[str, Any], names: Mapping[str, str]) -> Table:
    """Returns a table of the targets of a backend: met, missed or not measured.

    Measurements on a busy machine count as not measured.
    """
    rows = []
    cores = results["machine"].get("cores", math.inf)

    def row(target: str, value: str, is_met: bool | None, item: Mapping[str, Any] = {}) -> None:
        if is_met is not None and busy(item, cores):
            value, is_met = f"{value}, busy machine", None
        verdict = "not measured" if is_met is None else "met" if is_met else "missed"
        rows.append([target, value, verdict])

    backend = results["machine"]["backend"]
    for item, rival, times in TARGETS.get(backend, ()):
        item_results = results["items"].get(item, {})
        ratio = item_results.get("who", {}).get(rival, {}).get("times_faster")
        row(
            f"{backend.upper()}, {item}: {times:g} x {names[rival]}",
            "" if ratio is None else f"{ratio:.2f} x",
            None if ratio is None else ratio >= times,
            item_results,
        )
    for item, most in MICROSECONDS.get(backend, ()):
        item_results = results["items"].get(item, {})
        library_results = item_results.get("who", {}).get("library")
        time = None if library_results is None else 1000 * library_results["ms_per_client_step"]
        row(
            f"{backend.upper()}, {item}: a client step in {most:g} us",
            "" if time is None else f"{time:.3g} us",
            None if time is None else time <= most,
            item_results,
        )
    for item, least in SHARES.get(backend, ()):
        item_results = results["items"].get(item, {})
        library_results = item_results.get("who", {}).get("library")
        share = None if library_results is None else library_results["share_of_peak"][0]
        row(
            f"{backend.upper()}, {item}: {100 * least:.0f} % of the peak",
            "" if share is None else f"{100 * share:.0f} %",
            None if share is None else share >= least,
            item_results,
        )
    large = results["items"].get("lenet-1000", {})
    ratio_with_few = large.get("step_ratio")
    step_ratio = ratio_with_few[0] if ratio_with_few else None
    row(
        f"{backend.upper()}, lenet: time of a client step with 1,000 clients, relative to 10, "
        f"at most {1 + _STEP_TOLERANCE:g} x",
        "" if step_ratio is None else f"{step_ratio:.2f} x",
        None if step_ratio is None else step_ratio <= 1 + _STEP_TOLERANCE,
        large,
    )
    for name in ("pfedla", "pfedhn", "fedmn", "factorized_fl"):
        seconds = results["compile_seconds"].get(name)
        row(
            f"default configuration of {name} compiles in {_COMPILE_SECONDS:g} s",
            "" if seconds is None else f"{seconds:.1f} s",
            None if seconds is None else seconds < _COMPILE_SECONDS,
            results.get("compile", {}),
        )
    return Table("Targets and results.", ["measured", ""], rows)


def curve(results: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Returns milliseconds of a client step of LeNet by library and number of clients.

    The point of this library with few clients is a median of times. All others are it multiplied by
    ratios within turns, so they do not depend on how busy the machine was.
    """
    points: dict[str, dict[int, float]] = {}
    few = results.get("lenet-10")
    for name, item in sorted(results.items(), key=lambda pair: int(pair[1]["clients"])):
        if not name.startswith("lenet-"):
            continue
        milliseconds = item["who"]["library"]["ms_per_client_step"]
        if few and (ratio := item.get("step_ratio")):
            milliseconds = few["who"]["library"]["ms_per_client_step"] * ratio[0]
        for name, entry in item["who"].items():
            times = 1.0 if name == "library" else entry["times_faster"]
            points.setdefault(name, {})[item["clients"]] = _round(milliseconds * times)
    return points
