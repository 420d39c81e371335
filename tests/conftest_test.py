"""Options of the tests."""

import pytest

from tests.conftest import share


def test_a_share_of_the_slow_tests_is_checked():
    assert share("1/1") == (1, 1)
    assert share("2/3") == (2, 3)
    for text in ("0/2", "3/2", "1", "1/0", "a/b", "-1/2", "1/2/3"):
        with pytest.raises(pytest.UsageError, match=f"^--share={text} is no share"):
            share(text)
