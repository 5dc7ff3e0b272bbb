"""`python -P -m headway` is `headway`; without -P, Python itself looks for `headway` in the current folder first."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder, which `-m` has put there

from headway.cli.app import main  # with all that it imports, only then

main()
