"""Scaling of a model in width or depth: sizes, rules of parametrisation, and exponents of measures.

Names are imported on first use: rules and exponents need no torch.
"""
