"""The commands that this package adds to `limitformer`, found by the entry point `limitformer.commands`."""

# Name of a command → the object that it is, and its line in the list of commands (imported when a command runs).
COMMANDS = {
    "figure": (
        "limitformer_papers.commands.figure:figure",
        "Make a figure of a paper: picture, data, and the claims that it checks.",
    ),
    "train": (
        "limitformer_papers.commands.train:train",
        "Train the networks of both papers. A run that was stopped goes on when it is started again.",
    ),
}
