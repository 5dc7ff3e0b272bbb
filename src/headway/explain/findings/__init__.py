"""Findings, which say what to do first: rules in one table, by subject, and the evidence that they read."""
