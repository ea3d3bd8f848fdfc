"""Predictions of `transfer` at four times the width, against drawn networks."""
