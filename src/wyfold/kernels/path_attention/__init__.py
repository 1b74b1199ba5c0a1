"""Softmax of PaTH attention: rows of queries go back from their own chunk to the first, and meet keys on the way.

    own chunk           logits Z
    chunks of its block logits x k^T        then x <- x - (x w^T) W
    blocks before       logits x k^T        then x <- x M
    earlier calls       logits x k^T

x is the row at the start of what was met last; keys are at the end of their chunk or block. Logits are `scale` times
the product plus `gate` times the sum of log gates between key and query. The softmax is computed while keys are met.
"""
