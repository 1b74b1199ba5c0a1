"""Short convolution of a few tokens, in one launch, with earlier inputs kept in a pool's slots and updated in place.

A slot holds S >= W - 1 inputs, oldest first. The W - 1 inputs before a sequence's first token begin at entry a - 1,
where a is the number of accepted tokens of the previous call (1 if not given). After this call's tokens x[0], x[1], ..

    slot = the last W - 2 of those inputs, x[0], x[1], ..        as far as the slot is long

So the same rule finds the inputs before the next token for every accepted number, and no input is moved.
"""
