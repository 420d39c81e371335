"""Privacy accounting with the package dp-accounting: ε of a run, and the noise for a target ε.

The neighbouring relation is replace-one: two federations differ in all data of one client (or, at
the example level, in one example of one client), and the numbers of clients and examples are
public. With random sampling each round samples K of N clients without replacement, so amplification
is that of Wang, Balle and Kasiviswanathan, Subsampled Rényi Differential Privacy and Analytical
Moments Accountant, 2019, Theorem 27. The smaller of this ε and of ε without amplification counts;
both are valid. Amplification requires that observers of the models do not know who takes part.
Its composition over rounds is proved for clients without state only, so others are refused. Clients
that take part in turn have no amplification and fewer participations.
"""

import functools
from typing import Any, NamedTuple

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.transforms.privacy import correlated_noise

# Any subset of orders gives a valid ε.
_ORDERS = (*range(2, 65), 80, 96, 128, 256)
# A changed record moves a sum of clipped vectors by at most two clipping norms.
_SENSITIVITY = 2.0
_PRECISION = 1e-4  # relative, of the noise multiplier for a target


class Sampling(NamedTuple):
    """Number of times that data is used, and the share that is sampled each time."""

    sampled: int  # records per use, such as clients per round
    population: int  # records to sample from; equal to `sampled`: no amplification
    uses: int = 1  # uses per round
    is_cyclic: bool = False  # records are used in turn instead of sampled
    bands: int = 1  # bands of correlated noise, see `correlated_noise`; 1: independent noise


@functools.lru_cache(maxsize=1024)
def epsilon(sampling: Sampling, noise_multiplier: float, delta: float, rounds: int) -> float:
    """Returns ε after a number of rounds, infinite without noise and 0 before the first round.

    Args:
      sampling: How records are sampled in a round.
      noise_multiplier: Standard deviation of the noise on a sum, in clipping norms.
      delta: δ of the guarantee.
      rounds: Number of finished rounds.
    """
    uses = rounds * sampling.uses
    if uses == 0:
        return 0.0
    if noise_multiplier == 0:
        return float("inf")
    dp = _package()
    multiplier, squared_sensitivity = noise_multiplier / _SENSITIVITY, float(uses)
    if sampling.is_cyclic:
        squared_sensitivity = correlated_noise.squared_sensitivity(
            sampling.bands, sampling.sampled, sampling.population, rounds
        )
    unamplified = float(dp.get_epsilon_gaussian(multiplier / squared_sensitivity**0.5, delta))
    if sampling.is_cyclic or sampling.sampled == sampling.population:
        return unamplified
    accountant = dp.rdp.RdpAccountant(_ORDERS, dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(
        sampling.population, sampling.sampled, dp.GaussianDpEvent(multiplier)
    )
    return min(unamplified, float(accountant.compose(event, uses).get_epsilon(delta)))


@functools.lru_cache(maxsize=64)
def noise_multiplier(sampling: Sampling, target: float, delta: float, rounds: int) -> float:
    """Returns the smallest noise multiplier, up to 0.01 %, whose ε is at most the target.

    Args:
      sampling: How records are sampled in a round.
      target: ε after all rounds.
      delta: δ of the guarantee.
      rounds: Number of rounds of the run.
    """
    high = 1.0
    while epsilon(sampling, high, delta, rounds) > target:
        high *= 2
    low = 0.0 if high == 1 else high / 2
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if epsilon(sampling, middle, delta, rounds) > target:
            low = middle
        else:
            high = middle
    return high


def _package() -> Any:
    """Returns the package dp-accounting. Raises UsageError if it is missing."""
    try:
        import dp_accounting
    except ImportError:
        raise UsageError(
            "dp-accounting is missing: run pip install '.[privacy]' in the clone"
        ) from None
    return dp_accounting
