"""The largest learning rate that networks bear, and the range to tune in."""
