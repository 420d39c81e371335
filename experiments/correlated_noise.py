"""Compares independent and correlated noise of client-level privacy by formula, without training.

python -m experiments.correlated_noise --clients=1000 --clients_per_round=50 --rounds=400

Prints a table for equal ε: the expected squared error of the sum of all updates, per number and in
squared clipping norms. It is after the last round, and a mean over the rounds.

Poisson sampling is not in this library. Its row shows independent noise with tight accounting: ε of
adding or removing a client is exact up to discretisation, and both together replace a client.
"""

import math
from collections.abc import Sequence

import dp_accounting
import numpy as np
from absl import flags

from fedjax_pfl.cli.command import run_script
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import text_tables
from fedjax_pfl.transforms.privacy import accounting, correlated_noise
from fedjax_pfl.transforms.privacy.accounting import Sampling


def squared_errors(bands: int, rounds: int) -> tuple[float, float]:
    """Returns the error at noise multiplier 1: after the last round, and the mean over the rounds.

    The noise of the model after round t is Σ_{m≤t} p_m z_{t−m}, where p_m is the sum of the first
    m + 1 numbers in the first column of the inverse of C.
    """
    c = correlated_noise.coefficients(bands)
    inverse = np.zeros(rounds)
    inverse[0] = 1
    for t in range(1, rounds):
        last = inverse[max(0, t - bands + 1) : t][::-1]
        inverse[t] = -last @ c[1 : len(last) + 1]
    variances = np.cumsum(np.cumsum(inverse) ** 2)
    return float(variances[-1]), float(np.mean(variances))


def poisson_noise(rate: float, rounds: int, epsilon: float, delta: float) -> float:
    """Returns the noise multiplier with Poisson sampling for a replaced client."""
    return float(
        dp_accounting.calibrate_dp_mechanism(
            lambda: dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3),
            lambda noise: dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)),
                rounds,
            ),
            epsilon / 2,
            delta / (1 + np.exp(epsilon / 2)),
            tol=1e-3,
        )
    )


def compare(
    clients: int, clients_per_round: int, rounds: int, epsilons: Sequence[float], delta: float
) -> str:
    """Returns a Markdown table with a row for each kind of noise."""
    separation = clients // clients_per_round
    in_turn = Sampling(clients_per_round, clients, is_cyclic=True)
    kinds = {"random, independent": Sampling(clients_per_round, clients)}
    for bands in sorted({1, max(1, separation // 4), separation}):
        kinds[f"cyclic, {bands} band{'s' * (bands > 1)}"] = in_turn._replace(bands=bands)
    heads, rows = list[str](), [[name] for name in ("Poisson, independent", *kinds)]
    for epsilon in epsilons:
        heads += [f"ε = {epsilon:g}, last round", f"ε = {epsilon:g}, mean"]
        noises = [(poisson_noise(clients_per_round / clients, rounds, epsilon, delta), 1)]
        for sampling in kinds.values():
            noise = accounting.noise_multiplier(sampling, epsilon, delta, rounds)
            noises.append((noise, sampling.bands))
        for row, (noise, bands) in zip(rows, noises, strict=True):
            errors = (noise**2 * error for error in squared_errors(bands, rounds))
            row += [f"{float(f'{error:.3g}'):,.0f}" for error in errors]
    return text_tables.markdown([text_tables.Table("", heads, rows)]).strip()


def parse_epsilons(texts: Sequence[str]) -> list[float]:
    """Returns the numbers in a list of texts; raises UsageError unless all are above 0."""
    try:
        epsilons = [float(text) for text in texts]
    except ValueError:
        epsilons = []
    if not epsilons or not all(0 < epsilon < math.inf for epsilon in epsilons):
        raise UsageError(f"--epsilons={','.join(texts)} is no list of numbers above 0, such as 4,8")
    return epsilons


def main(argv: Sequence[str]) -> None:
    """Prints the table for the flags."""
    values = flags.FLAGS
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag; see --help")
    if values.clients_per_round > values.clients:
        raise UsageError("--clients_per_round is above --clients; lower it")
    if values.delta >= 1 / values.clients:
        raise UsageError(
            f"--delta={values.delta:g}: with {values.clients:,} clients it must be below "
            f"{1 / values.clients:g}"
        )
    print(
        compare(
            values.clients,
            values.clients_per_round,
            values.rounds,
            parse_epsilons(values.epsilons),
            values.delta,
        )
    )


if __name__ == "__main__":
    # Here, because other commands have flags of these names.
    flags.DEFINE_integer("clients", 1000, "Number of clients.", lower_bound=1)
    flags.DEFINE_integer("clients_per_round", 50, "Clients per round.", lower_bound=1)
    flags.DEFINE_integer("rounds", 400, "Rounds.", lower_bound=1)
    flags.DEFINE_list("epsilons", ["4", "8"], "Targets of ε after all rounds.")
    flags.DEFINE_float("delta", 1e-5, "δ of the guarantee.", lower_bound=1e-12)
    run_script(main, __doc__)
