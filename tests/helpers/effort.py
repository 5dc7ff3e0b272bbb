"""How much of a law is tried: by `make test` a part, by other runs all of it, by `make test-long` ten times as much."""

import os

PROFILE = os.environ.get("HEADWAY_TEST_PROFILE", "headway")
IS_QUICK = PROFILE == "quick"


def examples(quick, usual):
    """The number of examples that a property is tried on."""
    return quick if IS_QUICK else 10 * usual if PROFILE == "long" else usual
