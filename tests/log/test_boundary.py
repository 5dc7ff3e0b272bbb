import warnings

import pytest

from headway.log.boundary import ErrorBoundary


def test_an_observer_that_fails_warns_once_and_names_what_is_lost():
    boundary = ErrorBoundary()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            with boundary.guard("The energy"):
                raise ZeroDivisionError(f"reading {number}")
        with boundary.guard("The profile", "The loop goes on."):
            raise OSError("disk full")
    assert [str(warning.message) for warning in caught] == [
        "The energy: ZeroDivisionError: reading 0. Training goes on without.",
        "The profile: OSError: disk full. The loop goes on.",
    ]
    assert boundary.lost == {"The energy": "ZeroDivisionError: reading 0", "The profile": "OSError: disk full"}
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("wish", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_is_no_error_of_an_observer(wish):
    boundary = ErrorBoundary()
    with pytest.raises(wish), boundary.guard("The energy"):
        raise wish
    assert boundary.lost == {}
