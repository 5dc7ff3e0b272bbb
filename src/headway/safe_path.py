"""Imports of installed packages alone: never of a file that happens to lie in the current folder.

`python -m` and `python -c` put the current folder first on the import path, before the standard library, and the
processes that multiprocessing starts are `python -c`. A folder of data or a model from a stranger may hold a
`multiprocessing.py`. Python leaves that folder out where PYTHONSAFEPATH is set; PYTHONPATH holds as ever.

Source: docs.python.org/3.11/using/cmdline.html, PYTHONSAFEPATH; github.com/python/cpython/issues/157916.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"


def keep_current_folder_out() -> None:
    """Let no process that this one starts import from the current folder; for processes that are Headway's own."""
    os.environ[SAFE_PATH_VARIABLE] = "1"


@contextmanager
def current_folder_kept_out() -> Iterator[None]:
    """The same for what is started meanwhile: this process may be somebody's own program, whose variables stay."""
    before = os.environ.get(SAFE_PATH_VARIABLE)
    keep_current_folder_out()
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH_VARIABLE]
        else:
            os.environ[SAFE_PATH_VARIABLE] = before
