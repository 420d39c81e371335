"""Options of the tests."""

import pytest

from tests.conftest import is_in_share, share


def test_a_share_of_the_slow_tests_is_checked():
    assert share("1/1") == (1, 1)
    assert share("2/3") == (2, 3)
    for text in ("0/2", "3/2", "1", "1/0", "a/b", "-1/2", "1/2/3"):
        with pytest.raises(pytest.UsageError, match=f"^--share={text} is no share"):
            share(text)


def test_every_group_of_tests_is_in_one_share():
    """The Adler sum of "b" is 2¹⁶ · 99 + 99, which 3 divides."""
    assert [is_in_share("b", k, 3) for k in (1, 2, 3)] == [True, False, False]
    for group in map(str, range(50)):
        assert [is_in_share(group, k, 4) for k in (1, 2, 3, 4)].count(True) == 1
    assert {k for k in (1, 2, 3, 4) for i in range(50) if is_in_share(str(i), k, 4)} == {1, 2, 3, 4}
