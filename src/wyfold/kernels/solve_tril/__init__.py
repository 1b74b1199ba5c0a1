"""(I + L)^-1 of the strictly lower triangle of every chunk, in one launch.

    X[r, :] = I[r, :] - sum_{s<r} L[r, s] X[s, :]

16 rows by substitution, then block products, in float32 or wider; never powers of L. What stands on and above the
diagonal, and past the last column of a short chunk, changes no bit.
"""
