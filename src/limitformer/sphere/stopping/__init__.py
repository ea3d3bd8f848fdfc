"""Replicas that stop early: bounds on their return, tokens that merge, and two clusters as two points."""
