"""Datasets of finished simulations: how they are built, saved and read."""
