"""Tokens so close to each other, or to antipodes, that coordinates lose their distance to rounding."""
