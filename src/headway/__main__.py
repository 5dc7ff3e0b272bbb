"""`python -m headway` is `headway`."""

from headway.cli.app import main

main()
