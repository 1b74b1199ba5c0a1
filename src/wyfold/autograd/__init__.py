"""The autograd functions: each direction of an operator family as a list of launches."""
