"""The commands that this package adds to `limitformer`, found through the entry point `limitformer.commands`."""

# Command → (object, imported when the command runs; its line in the list of commands).
COMMANDS = {
    "figure": (
        "limitformer_papers.commands.figure:figure",
        "Make a figure of a paper: picture, data and checked claims.",
    ),
    "train": (
        "limitformer_papers.commands.train:train",
        "Train the networks of both papers. A run that was stopped resumes when it is started again.",
    ),
}
