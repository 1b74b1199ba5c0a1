"""States and outputs of a part of a diagonal-plus-low-rank rule, serial over its columns of chunks.

    U = rows S        o = scale (Q S + P V)        S <- exp(G_last) S + E^T U + K^T V

The output depends on the entering state alone. The serial chain is U, then S: two dependent products per chunk.
"""
