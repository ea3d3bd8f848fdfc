"""The largest learning rate that networks bear, the range to tune in, and equivalent rates."""
