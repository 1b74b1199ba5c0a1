"""Decayed grams under a channel gate, one gate per key channel, and their adjoint."""
