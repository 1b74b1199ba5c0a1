"""Grams under a gate of its own for every key channel, and their adjoint."""
