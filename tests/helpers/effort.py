"""How much of a law is tried: by `make test` a part, by other runs all of it, by `make test-long` ten times as much."""

import os

import pytest

PROFILE = os.environ.get("HEADWAY_TEST_PROFILE", "headway")
IS_QUICK = PROFILE == "quick"


def examples(quick, usual):
    """The number of examples that a property is tried on."""
    return quick if IS_QUICK else 10 * usual if PROFILE == "long" else usual


def some(cases, is_often):
    """Mark as slow the cases of a law that `make test` need not try.

    Args:
        cases: values of one parameter, or tuples of several.
        is_often: whether `make test` tries a case too.
    """
    parts = ((case, case if isinstance(case, tuple) else (case,)) for case in cases)
    return [case if is_often(case) else pytest.param(*values, marks=pytest.mark.slow) for case, values in parts]
