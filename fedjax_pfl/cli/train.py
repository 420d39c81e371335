"""The commands that train: fedjax-pfl pfedla, pfedhn, fedmn, factorized_fl and baseline."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from absl import flags

from fedjax_pfl import presets
from fedjax_pfl.cli.command import Call, Command, check_no_positional
from fedjax_pfl.cli.configs import changed_settings, default_workdir, define_data_dir, read_settings
from fedjax_pfl.cli.processes import ProcessOptions, run_in_processes
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import interrupt, runner
from fedjax_pfl.settings import configuration, custom, listing, selection
from fedjax_pfl.simulation import multiprocess
from fedjax_pfl.simulation.devices import prepare_devices


def define_flags(options: flags.FlagValues) -> None:
    """Adds the flags of the command to `options`, except --config."""
    string = partial(flags.DEFINE_string, flag_values=options)
    integer = partial(flags.DEFINE_integer, flag_values=options)
    string(
        "workdir",
        None,
        "Run directory. Give the same command again to resume. Default: runs/ and the preset.",
    )
    define_data_dir(options)
    integer(
        "processes",
        1,
        "Number of processes that compute this run; on one machine this starts them all.",
        lower_bound=1,
    )
    integer(
        "process", None, "Number of this process, if every machine starts its own.", lower_bound=0
    )
    string("coordinator", None, "HOST:PORT of process 0, or auto on SLURM and TPU pods.")
    integer("wait", 300, "Seconds to wait for all processes.", lower_bound=1)


def train(name: str, call: Call) -> None:
    """Trains with the settings in `call`; prints scores. `name` is the command, such as pfedla."""
    check_no_positional(call)
    options = call.options
    settings = read_settings(options, call.arguments)
    registry, values = custom.register(settings.to_dict())
    complete = configuration.complete(values, registry)
    selection.check_used(selection.nested(changed_settings(options)), [complete], registry)
    is_alone = options.processes == 1 and options.process is None and options.coordinator is None
    if is_alone and options["wait"].present:
        raise UsageError("--wait has no effect with one process; leave it out")
    workdir = Path(options.workdir or default_workdir(name, call.arguments))
    processes = ProcessOptions(
        processes=options.processes,
        process=options.process,
        coordinator=options.coordinator,
        wait=options.wait,
    )
    prepare_devices()
    with run_in_processes(processes), interrupt.on_signals() as stop:
        results = runner.run_all(settings, str(workdir), stop, tell=partial(print, flush=True))
        if multiprocess.lead():
            show(workdir, results)


def show(workdir: Path, results: Mapping[str, runner.Result]) -> None:
    """Prints the scores of a run, or compares the runs of a sweep and prints and writes the tables.

    A run that is no sweep has the name "" in `results`.
    """
    for result in results.values():
        if result.resumed_at is not None:
            finished = result.resumed_at == result.metrics[-1]["round"]
            word = "was finished" if finished else "resumed"
            print(f"This run {word} at round {result.resumed_at}; it is in {result.directory}.")
    from fedjax_pfl.report import comparison, comparison_page, page  # imports matplotlib

    if "" in results:
        print(page.table(results[""].metrics))
        print(f"\nReport: {workdir / 'report.html'}")
    else:
        rows = comparison.group([comparison.read(workdir / name) for name in results])
        path = comparison_page.write(rows, workdir / "compare")
        print(f"{comparison_page.text(rows)}\n\nPage: {path}")
        print(f"Reports: {workdir}/*/report.html")


def help_text(name: str) -> str:
    """Returns the help of a command such as pfedla: its presets and the settings of its method."""
    method = name if name in configuration.ALGORITHMS else "fedavg"
    return f"{(presets.SYSTEMS[name].__doc__ or '').strip()}\n\n{listing.command_help(method)}"


COMMANDS = {
    name: Command(partial(help_text, name), define_flags, partial(train, name), system=name)
    for name in presets.SYSTEMS
}
