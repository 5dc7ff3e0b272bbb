"""The command line: one small file per command that parses, calls the library and renders.

`app.py` registers the commands and turns errors into one readable paragraph and an exit code.
"""
