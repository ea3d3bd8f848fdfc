"""What to set before training, from the law alone."""
