"""Steps of one recipe share its ledger."""

from helpers.runs import ledgers  # noqa: F401 - a fixture of all tests here
