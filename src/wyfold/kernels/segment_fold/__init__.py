"""States at the borders of segments, computed serially from the segments' affine maps.

    forward     S[r] = H[r],    S[r + 1] = H[r + 1] + M[r + 1] S[r]         from a sequence's first border to its last
    backward    dS[r] = c[r],   dS[r - 1] = c[r - 1] + M[r]^T dS[r]         from its last border to its first

H of a sequence's first segment is its true final state, and c of the last one its true gradient. M[r] is the map of the
segment that ends at border r. Results stay float32.
"""
