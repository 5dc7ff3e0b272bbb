"""Trace every architecture of the installed transformers, and hold each ledger against a second witness.

`python -m tools.sweep benchmarks/results/architectures_202611.md` writes the page; `witness` and `uses` are the second
pair of eyes, `sizes` holds what conventions read off configurations against the ledgers, `defaults` mends
configurations that do not run.
"""
