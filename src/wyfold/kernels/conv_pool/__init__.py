"""The short convolution of a few tokens behind inputs that lie in the slots of a pool, updated in place, in one launch.

A slot holds S >= W - 1 inputs, oldest first. The W - 1 before a sequence's first token begin at entry a - 1, where a of
the previous call's tokens were accepted (one, unless it is said); after this call's tokens x[0], x[1], ..

    slot = the last W - 2 of those inputs, x[0], x[1], ..        as far as there is room

so that the same rule finds the inputs before the next token, whatever number is accepted: none is moved for it.
"""
