"""`limitformer train`: the papers' experiments, small on a laptop and at paper size on GPUs."""

import typer

from limitformer.cli.train_glue import glue
from limitformer.cli.train_mlm import mlm
from limitformer.cli.train_vit import vit

train = typer.Typer(help="Train the networks of both papers. A run that was stopped goes on when it is started again.")
train.command("mlm")(mlm)
train.command("glue")(glue)
train.command("vit")(vit)
