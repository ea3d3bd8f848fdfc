"""The command line: `limitformer …`."""

from limitformer.cli.app import main as main
