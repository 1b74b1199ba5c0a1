"""Runs of rows, for steps in which rows have nothing to do with each other."""
