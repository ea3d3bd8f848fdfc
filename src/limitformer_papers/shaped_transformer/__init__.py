"""Figures of [ST], one file each."""
