"""Checks that a user-defined method keeps the rules of the method contract."""

from collections.abc import Callable
from typing import Any

from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.local_training import Training
from fedjax_pfl.testing import example
from fedjax_pfl.testing.rules import RULES, Subject, make_world

__all__ = ["check"]


def check(
    factory: Callable[..., Algorithm],
    *,
    model: Any = None,
    training: Training | None = None,
    rows_of_absent_clients_change: bool = False,
    tell: Callable[[str], None] = print,
    **settings: Any,
) -> None:
    """Checks all rules on a tiny federation of six clients; takes some seconds.

    >>> from fedjax_pfl import fedavg
    >>> check(fedavg, tell=lambda line: None)

    Args:
      factory: (model, training, federation, **settings) -> Algorithm.
      model: Flax module for inputs of shape [5] and 3 classes. Default: a small network with
        BatchNorm.
      training: Local training. Default: SGD with momentum, decay, clipping and a short last batch.
      rows_of_absent_clients_change: Set it if the server-side rows of absent clients change by
        design, for instance because of momentum.
      tell: Called with a line for every rule: ok or broken, its title and the reason. An error in
        the method breaks the rule.
      **settings: The method's own settings.

    Raises:
      AssertionError: If a rule is broken; it names all broken rules. Its cause is the first error
        in the method, if there was one.
    """
    if not callable(factory) or isinstance(factory, Algorithm):
        raise UsageError("check takes a method's factory, such as fedavg, not what it returns")
    name = getattr(factory, "__name__", "the method")

    def make(federation: Federation) -> Algorithm:
        network = example.TinyNetwork() if model is None else model
        local_training = example.training() if training is None else training
        return factory(network, local_training, federation, **settings)

    subject = Subject(
        name=name,
        make=make,
        world=make_world(example.vectors),
        rows_of_absent_clients_change=rows_of_absent_clients_change,
    )
    broken: list[str] = []
    cause: Exception | None = None
    for rule in RULES:
        title = rule.__name__.replace("_", " ")
        try:
            rule(subject)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            if not isinstance(error, AssertionError | UsageError):
                reason = f"{type(error).__name__}: {reason}"
                cause = cause or error
            reason = reason or type(error).__name__
            broken.append(f"{title}: {reason}")
            tell(f"broken  {title}: {reason}")
            if rule is RULES[0]:  # the other rules need functions of the right shapes
                break
        else:
            tell(f"ok      {title}")
    if broken:
        reasons = "; ".join(broken)
        message = f"{name} breaks {len(broken)} of {len(RULES)} rules; {reasons}"
        raise AssertionError(message) from cause
