"""The pilot of `rate`: networks' best learning rates, beside what their first steps say."""
