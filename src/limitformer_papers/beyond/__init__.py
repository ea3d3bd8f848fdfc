"""Figures of what neither paper has, one file each."""
