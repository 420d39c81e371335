"""Settings of differential privacy, and the ε that a run states."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.example_noise import ExampleNoise
from fedjax_pfl.core.local_training import Training
from fedjax_pfl.core.setting import Limits, Setting, UsedWith
from fedjax_pfl.transforms.attacks import ON_COHORT
from fedjax_pfl.transforms.privacy import accounting
from fedjax_pfl.transforms.privacy.accounting import Sampling
from fedjax_pfl.transforms.privacy.client_level import client_privacy
from fedjax_pfl.transforms.privacy.example_level import example_privacy
from fedjax_pfl.transforms.privacy.local_level import local_privacy
from fedjax_pfl.transforms.private_layers import kept_layers
from fedjax_pfl.transforms.wrapping import Selectable, Statement, Transform, TransformContext

_LEVELS = ("client", "example", "local")
_LEAST_NOISE = 1e-9  # accounting does not converge far below


class Guarantee(NamedTuple):
    """Differential privacy of a run."""

    level: str  # value of the setting `privacy`
    sampling: Sampling
    clip_norm: float  # infinite: no clipping
    noise_multiplier: float  # 0: no guarantee
    delta: float

    def epsilon(self, rounds: int) -> float:
        """Returns ε after a number of rounds; infinite without noise."""
        return accounting.epsilon(self.sampling, self.noise_multiplier, self.delta, rounds)


def guarantee(value_of: Callable[[str], Any], federation: Federation) -> Guarantee | None:
    """Returns the guarantee that the settings request, or None if the setting `privacy` is none.

    `value_of` returns the value of a setting by its name.
    """
    level, clip_norm = value_of("privacy"), value_of("privacy_clip_norm")
    if level == "none":
        return None
    noise, target = value_of("privacy_noise"), value_of("privacy_epsilon")
    delta = value_of("privacy_delta")
    if (noise is None) == (target is None):
        raise UsageError(
            "privacy needs exactly one of privacy_noise and privacy_epsilon; set one, such as "
            "privacy_epsilon=8"
        )
    if noise is not None and 0 < noise < _LEAST_NOISE:
        raise UsageError(f"privacy_noise is {noise:g}; use 0, or at least {_LEAST_NOISE:g}")
    if clip_norm is None and (noise != 0 or level != "client"):
        raise UsageError("privacy_clip_norm is unset, and noise needs it; set it, such as to 1")
    if value_of("max_update_norm") is not None:
        raise UsageError(
            "max_update_norm rejects an update by its data, which privacy does not cover; leave it "
            "out"
        )
    if level == "client" and (value_of("robust_rule") != "mean" or value_of("robust_mixing")):
        raise UsageError(
            "privacy=client needs the mean of the uploads; leave robust_rule and robust_mixing out"
        )
    if level == "client" and value_of("attack") in ON_COHORT:
        raise UsageError(
            f"attack={value_of('attack')} copies a client's unclipped update into several uploads, "
            "which privacy=client does not cover; choose another attack"
        )
    sampling = _sampling(value_of, federation)
    _check_bands(sampling)
    is_compressed = value_of("upload_bits") is not None or value_of("upload_top_k") is not None
    if level == "client" and is_compressed and _is_amplified(sampling):
        raise UsageError(
            "compression keeps its errors on clients, and epsilon with random sampling is proved "
            "only without such state; set sampling=cyclic, or leave clients_per_round out"
        )
    active = federation.active
    records = int(np.max(federation.counts[active]) if level == "example" else np.sum(active))
    if delta >= 1 / records:
        unit = "examples of a client" if level == "example" else "clients"
        raise UsageError(
            f"privacy_delta is {delta:g}, and with {records} {unit} it must be below "
            f"{1 / records:g}"
        )
    if target is not None:
        noise = accounting.noise_multiplier(sampling, target, delta, value_of("rounds"))
    return Guarantee(
        level=level,
        sampling=sampling,
        clip_norm=math.inf if clip_norm is None else clip_norm,
        noise_multiplier=noise,
        delta=delta,
    )


def fixed_noise(value_of: Callable[[str], Any], federation: Federation) -> dict[str, Any]:
    """Returns the settings that keep the noise of a run if its rounds or local steps change.

    `value_of` returns the value of a setting by its name. Returns {} without privacy.
    """
    requested = guarantee(value_of, federation)
    if requested is None:
        return {}
    return {"privacy_noise": requested.noise_multiplier, "privacy_epsilon": None}


def _sampling(value_of: Callable[[str], Any], federation: Federation) -> Sampling:
    """Returns how often a round uses a client's data or, at the example level, an example.

    A server knows who takes part, so local and example privacy count every client in every round.
    An epoch uses each example once, and its order is no sample. A step samples a batch.
    """
    level, active = value_of("privacy"), int(np.sum(federation.active))
    if level == "client":
        return Sampling(
            sampled=value_of("clients_per_round") or active,
            population=active,
            is_cyclic=value_of("sampling") == "cyclic",
            bands=value_of("privacy_bands"),
        )
    steps = value_of("local_steps")
    if level == "local" or steps is None:
        uses = 1 if level == "local" else value_of("local_epochs") or 1
        return Sampling(sampled=active, population=active, uses=uses)
    counts = federation.counts[federation.active]
    fewest = int(np.min(counts[counts > 0], initial=np.max(counts, initial=1)))
    return Sampling(sampled=min(value_of("batch_size"), fewest), population=fewest, uses=steps)


def _is_amplified(sampling: Sampling) -> bool:
    """Returns True if ε is smaller because clients are sampled at random."""
    return not sampling.is_cyclic and sampling.sampled < sampling.population


def _check_bands(sampling: Sampling) -> None:
    """Raises UsageError if clients may take part more than once in as many rounds as bands."""
    if sampling.bands == 1:
        return
    if not sampling.is_cyclic:
        raise UsageError(
            f"privacy_bands is {sampling.bands}, and random sampling bounds no client's rounds; "
            "set sampling=cyclic"
        )
    separation = sampling.population // sampling.sampled
    if sampling.bands > separation:
        raise UsageError(
            f"privacy_bands is {sampling.bands}, and with {sampling.sampled} of "
            f"{sampling.population} clients a round it is at most {separation}; choose that, or "
            "lower clients_per_round"
        )


def _make(value_of: Callable[[str], Any], context: TransformContext) -> Transform | None:
    """Returns the transform, or None if the setting privacy is none.

    `value_of` returns the value of a setting by its name.
    """
    requested = guarantee(value_of, context.federation)
    if requested is None:
        return None
    if requested.level == "example":
        assert context.training is not None
        return example_privacy(context.data, context.training)
    if requested.level == "local":
        return local_privacy(
            context.data,
            clip_norm=requested.clip_norm,
            noise_multiplier=requested.noise_multiplier,
            private=kept_layers(value_of, context.model),
        )
    return client_privacy(
        context.federation,
        context.data,
        clients_per_round=requested.sampling.sampled,
        clip_norm=requested.clip_norm,
        noise_multiplier=requested.noise_multiplier,
        quantile=value_of("privacy_quantile"),
        bands=requested.sampling.bands,
        is_amplified=_is_amplified(requested.sampling),
    )


def _train(value_of: Callable[[str], Any], federation: Federation, training: Training) -> Training:
    """Returns local training, with noise on gradients at the example level."""
    if value_of("privacy") != "example":
        return training
    requested = guarantee(value_of, federation)
    assert requested is not None
    noise = ExampleNoise(requested.clip_norm, requested.noise_multiplier)
    return training._replace(example_noise=noise)


def _state(value_of: Callable[[str], Any], federation: Federation) -> Statement | None:
    """Returns the line and the numbers with which a run states ε; None without privacy."""
    requested = guarantee(value_of, federation)
    if requested is None:
        return None
    rounds, delta, bands = value_of("rounds"), requested.delta, requested.sampling.bands
    if requested.noise_multiplier == 0:
        line = f"privacy: {requested.level} level without noise, so there is no guarantee"
    else:
        line = (
            f"privacy: {requested.level} level, epsilon = {requested.epsilon(rounds):.4g} at delta "
            f"= {delta:g} after {rounds} rounds (replace-one); "
            + (f"noise of {bands} rounds is correlated; " if bands > 1 else "")
            + f"noise multiplier {requested.noise_multiplier:.4g}"
        )

    def metrics(round: int) -> dict[str, float | None]:
        value = requested.epsilon(round)
        return {"epsilon": value if math.isfinite(value) else None, "delta": delta}

    has_target = value_of("privacy_epsilon") is not None
    return Statement(line, metrics, "privacy_epsilon is for all rounds" if has_target else "")


_USED = UsedWith("privacy", _LEVELS)
PRIVACY = Selectable(
    "Privacy",
    {
        "privacy": Setting(
            "none",
            "Differential privacy. client: all data of a client, with noise once on the server. "
            "local: the same, with noise on each client. example: a client's single examples, with "
            "noise on gradients. none.",
            choices=("none", *_LEVELS),
            roles={"simulation_only"},  # all nodes would know the seed of the noise
        ),
        "privacy_clip_norm": Setting(
            float,
            "Largest norm of a client's update, or of an example's gradient. Larger ones are "
            "scaled down. Unset: unlimited, for client without noise only.",
            limits=Limits(above=0),
            used_with=_USED,
        ),
        "privacy_noise": Setting(
            float,
            "Standard deviation of the noise on the sum of updates or of a batch's gradients, or "
            "on each upload if local, as a multiple of privacy_clip_norm.",
            limits=Limits(low=0, high=1_000_000),  # epsilon is 0 above, or cannot be computed
            used_with=_USED,
        ),
        "privacy_epsilon": Setting(
            float,
            "Target epsilon after all rounds, from which the noise is computed, instead of "
            "privacy_noise.",
            limits=Limits(above=0),
            used_with=_USED,
        ),
        "privacy_delta": Setting(
            1e-5,
            "Delta of the guarantee.",
            limits=Limits(above=0, below=1),
            used_with=_USED,
        ),
        "privacy_quantile": Setting(
            float,
            "Share of updates to keep below the norm: adapts privacy_clip_norm, its first value. "
            "Unset: constant.",
            limits=Limits(above=0, below=1),
            used_with=UsedWith("privacy", ("client",)),
        ),
        "privacy_bands": Setting(
            1,
            "Number of rounds whose noise is correlated (DP-FTRL), with sampling=cyclic; at most "
            "the number of clients / clients_per_round. 1: independent noise.",
            limits=Limits(low=1),
            used_with=UsedWith("privacy", ("client",)),
        ),
    },
    _make,
    _state,
    _train,
)
