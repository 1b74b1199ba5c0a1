"""Layouts of tokens and tiles in memory; the only tile functions that load and store them."""
