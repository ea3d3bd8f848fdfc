"""Number formats: which tensors of a network leave their range at the start, and which updates round to nothing."""
