"""`limitformer train`: the papers' experiments, small on a laptop and at paper size on GPUs."""

import typer

from limitformer_papers.commands.train_glue import glue
from limitformer_papers.commands.train_mlm import mlm
from limitformer_papers.commands.train_vit import vit

train = typer.Typer(help="Train the networks of both papers. A run that was stopped resumes when it is started again.")
train.command("mlm")(mlm)
train.command("glue")(glue)
train.command("vit")(vit)
