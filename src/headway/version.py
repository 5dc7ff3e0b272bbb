"""The version of this package."""

__version__ = "0.1.0"
"""Version of the installed package, as `headway --version` prints it."""
