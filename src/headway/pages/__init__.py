"""Pages of a run (`run`, with `folder`), of two runs (`comparison`) and of samples (`samples`): their data.

Each reads records or samples into sections, facts and texts; the templates of `headway.report` lay them out.
"""
