"""Findings, which advise on the first thing to do: rules in one table, by subject, and the evidence that they read."""
