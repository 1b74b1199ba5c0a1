"""(I + L)^-1 of every chunk's strictly lower triangular L, in one launch.

    X[r, :] = I[r, :] - sum_{s<r} L[r, s] X[s, :]

Blocks of 16 rows by substitution, then block products, in float32 or wider; never powers of L. Entries on and above the
diagonal, and past the last column of a partial chunk, are ignored.
"""
