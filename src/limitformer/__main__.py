"""`python -m limitformer`."""

from limitformer.cli import main

main()
