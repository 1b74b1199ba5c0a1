"""Autograd functions and their registered operators: the kernel launches of each direction of an operator family."""
