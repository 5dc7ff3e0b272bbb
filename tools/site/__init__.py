"""The documentation site: the pages of docs/, and a reference that is written from the code as the site is built.

    make docs                       # site/index.html, which opens from the disk: nothing is asked of another host
    python -m tools.site FOLDER     # the same, in an environment with the extra `docs`

`navigation.yaml` lists the pages, `pages.py` reads it and turns links of the repository into links of the site;
`commands.py`, `records.py` and `api.py` write the reference, and `conf.py` is what Sphinx reads.
"""
