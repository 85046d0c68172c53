"""`python -m fivefold` is the `fivefold` command."""

from fivefold.cli import main

main()
