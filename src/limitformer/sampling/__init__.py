"""Shared by all simulations of paths: the process interface, replicas on threads, recording, exits."""
