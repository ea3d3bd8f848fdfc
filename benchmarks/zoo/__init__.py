"""Every model type of the installed transformers, small, through `weightless.simulate` and `check`.

`python -m benchmarks.zoo` writes a row for each type; `make zoo` also writes docs/architectures.md.
"""
