"""`python -m penstock.cli`, for places where the console script is not on the path."""

from penstock.cli import main

main()
