"""Training: one loop on packed data, its typed configuration, its checkpoints and its records.

Read `loop.py` from top to bottom; `config.py` says what can be set; `checkpoint.py` what a killed run resumes from.
"""
