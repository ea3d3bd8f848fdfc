"""The pilot of `rate`: the best learning rates of small networks, and what their first steps say."""
