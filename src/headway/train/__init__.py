"""Training: one loop on packed data, its preparation and its records.

Read `loop.py` from top to bottom; `run.py` sets it up. `headway.config` says what can be set, `headway.checkpoint` what
a killed run resumes from.
"""
