"""Rows and columns of a transition that is diagonal plus low rank."""
