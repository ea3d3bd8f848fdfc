"""Figures of [CT], one file each."""
