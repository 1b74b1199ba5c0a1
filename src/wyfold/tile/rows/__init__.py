"""Blocks of rows, for steps whose rows are independent."""
