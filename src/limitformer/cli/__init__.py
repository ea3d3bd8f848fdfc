"""The command line: `limitformer …`."""


def main() -> None:
    """Run the command line; until a command begins its work, Ctrl-C ends the process at once."""
    from limitformer.cli.endings import end_at_once_on_interrupt, prepare_environment

    end_at_once_on_interrupt()  # before anything large is imported
    prepare_environment()
    from limitformer.cli.app import run

    run()
