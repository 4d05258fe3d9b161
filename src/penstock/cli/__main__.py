"""`python -m penstock.cli`, for where the console script is not on the PATH."""

from penstock.cli import main

main()
