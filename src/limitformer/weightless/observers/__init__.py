"""Observers of the stream, of attention and of experts."""
