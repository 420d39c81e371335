"""Rules of `fedjax_pfl.testing` for the built-in methods, and two rules that need a case."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.testing import example, rules
from fedjax_pfl.testing.rules import make_world
from fedjax_pfl.transforms import Transform, chain
from tests import cases

TINY = make_world(example.vectors)


@dataclass(eq=False)
class Subject(rules.Subject):
    """A method with its case."""

    case: Any = None  # cases.Case


def make_subject(
    name: str, case: cases.Case, make: Callable[..., Algorithm], world: rules.World = TINY
) -> Subject:
    """Returns the subject of a method's case."""
    return Subject(
        name=name,
        make=make,
        world=world,
        rows_of_absent_clients_change=case.rows_of_absent_move,
        case=case,
    )


def subject(name: str) -> Subject:
    """Returns the subject of one of the library's methods."""

    def make(federation: Federation, settings: Mapping[str, Any] = cases.NOTHING) -> Algorithm:
        return cases.make(name, federation, settings)

    return make_subject(name, cases.CASES[name], make)


def the_interesting_branch_fires(subject: Subject) -> None:
    assert subject.case.fired(subject.first_state, subject.last[0])


def bytes_match_the_closed_formula(subject: Subject) -> None:
    _, log = subject.last
    zero = np.zeros(log.ids.shape, int)
    down, up = (sum(traffic.values(), zero) for traffic in (log.down, log.up))
    expected = subject.case.bytes_per_visit(cases.model_bytes())
    down_bytes, up_bytes = (size if isinstance(size, set) else {size} for size in expected)
    assert set(down.ravel().tolist()) <= down_bytes
    assert set(up[~log.dropped].tolist()) <= up_bytes


def check_transforms(name: str, *transforms: Transform) -> Subject:
    """Checks rules for one of the library's methods inside transforms, and returns the subject.

    Raises UsageError if a transform refuses the method.
    """

    def make(federation: Federation, settings: Mapping[str, Any] = cases.NOTHING) -> Algorithm:
        return chain(cases.make(name, federation, settings), *transforms)

    subject = make_subject(name, cases.CASES[name], make)
    for rule in _OF_TRANSFORMS:
        rule(subject)
    return subject


_OF_TRANSFORMS = (
    *(rules.equals_a_plain_loop, rules.padding_is_invisible, rules.absent_clients_are_untouched),
    *(rules.empty_slots_may_hold_anything, rules.a_checkpoint_holds_the_whole_state),
)
RULES = (*rules.RULES, the_interesting_branch_fires, bytes_match_the_closed_formula)
BY_NAME = {rule.__name__: rule for rule in RULES}
