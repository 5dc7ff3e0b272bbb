"""What tests share, a file for each subject.

`models` (tiny configurations and models by family), `families` and `folders` (what their folders are made of, and the
writing of them), `denoisers` (of diffusers), `data` (sources, media, feeds), `runs` (configurations, records,
ledgers), `processes`, `device` (a clock and a device that tests move), `loops` (of every integration), `traces`,
`pages`, `counter` (counts that use nothing of the tracer) and `cases` (how many cases a law is tried on, and the
dishonest ones). What a single test needs stands in that test, or beside it where a process runs it.
"""
