"""Shared parts of figures."""
