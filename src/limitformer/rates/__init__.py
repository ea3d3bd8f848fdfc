"""The largest learning rate that networks bear."""
