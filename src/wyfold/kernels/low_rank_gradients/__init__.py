"""Gradients of every token of a diagonal-plus-low-rank rule, from the states at the chunks' borders.

    W = A (U + Aak V)        the values that the erasing rows read
    X = F^T do + Z           gradient of U + Aak V
    dV = P^T do + K dS1
    dAab = stril(X W^T)      dAak = stril(X V^T)      dPqb = tril(do W^T)      dPqk = tril(do V^T)

The gradient of Aab is that of the solve. Gradients of rows and columns are the grams' adjoints, with the terms of the
entering and leaving states. If a rule erases along what it writes, b is k and the written value is W + V.
"""
