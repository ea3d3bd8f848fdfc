"""The contents of the pages of a check and of training steps."""
