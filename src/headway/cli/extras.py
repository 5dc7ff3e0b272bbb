"""What a command says when a library of an optional extra is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from headway.errors import HeadwayError


@contextmanager
def needs_extra(purpose: str, extra: str = "train") -> Iterator[None]:
    """Turn a missing library into a word on how to install it.

    Args:
        purpose: what needs it, as the beginning of the sentence: "training".
        extra: the extra that brings it.

    Raises:
        HeadwayError: a library of the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("headway"):
            raise
        raise HeadwayError(
            f"{purpose} needs {error.name}, which is not installed. Install the extra: pip install 'headway[{extra}]'."
        ) from error
