"""`fedjax_pfl.testing.check`."""

import jax
import pytest

import fedjax_pfl as pfl
from fedjax_pfl.core.errors import UsageError


def test_a_built_in_method_keeps_all_rules():
    lines = []
    pfl.testing.check(pfl.fedper, tell=lines.append)
    assert len(lines) == 11
    assert all(line.startswith("ok ") for line in lines)


def absent_counted(model, training, federation, *, rate: float = 1.0):
    base = pfl.fedavg(model, training, federation)

    def receive(state, cohort):
        mean = jax.tree.map(lambda leaf: leaf.mean(0), cohort.uploads)
        return mean, state.rows

    return base._replace(receive=receive)


def test_a_broken_rule_is_named():
    lines = []
    with pytest.raises(AssertionError, match="absent_counted breaks 3 of 11 rules") as caught:
        pfl.testing.check(absent_counted, tell=lines.append, rate=0.5)
    assert [line for line in lines if line.startswith("broken  empty slots may hold anything")]
    broken = [line.removeprefix("broken  ") for line in lines if line.startswith("broken")]
    assert len(broken) == 3
    assert all(reason in str(caught.value) for reason in broken)


def test_an_error_of_the_method_breaks_the_rule():
    lines = []

    def refuses_six(model, training, federation):
        base = pfl.fedavg(model, training, federation)

        def receive(state, cohort):
            if len(cohort.ids) == 6:
                raise TypeError("six slots\nare too many")
            return base.receive(state, cohort)

        return base._replace(receive=receive)

    with pytest.raises(AssertionError, match="refuses_six breaks 3 of 11 rules") as caught:
        pfl.testing.check(refuses_six, tell=lines.append)
    assert "broken  equals a plain loop: TypeError: six slots" in lines
    assert "empty slots may hold anything: TypeError: six slots; " in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)
    assert len(lines) == 11


def test_the_check_stops_at_wrong_shapes_and_refuses_a_value():
    lines = []

    def scalar(model, training, federation):
        return pfl.fedavg(model, training, federation)._replace(train=lambda *_: 3)

    with pytest.raises(AssertionError, match="must return ClientResult"):
        pfl.testing.check(scalar, tell=lines.append)
    assert len(lines) == 1
    with pytest.raises(UsageError, match="takes a method's factory"):
        pfl.testing.check(3)
