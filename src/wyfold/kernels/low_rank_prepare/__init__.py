"""Chunk factors of a diagonal-plus-low-rank rule, which do not depend on the state; parallel over chunks.

For rows r, s of one chunk and one value head, with Aab, Aak the grams of the erasing rows a, strictly lower, and Pqb,
Pqk those of the queries, lower (`tile.columns`):

    A = (I - Aab)^-1        F = Pqb A        E = A^T (b to the chunk's end)
    rows = a from the start        Q = (q from the start) + F rows
    P = Pqk + F Aak                K = (k to the end) + Aak^T E

With Phi the ordered product of the tokens' transitions D + b a^T, row r of Q is q_r^T Phi(r, 0), P[r, s] is
q_r^T Phi(r, s) k_s, and row s of K is Phi(n, s) k_s. Nothing large is subtracted: where every transition has norm 1
or less, the factors are bounded by the lengths of q, k and b. Row r of A, F and P does not depend on rows after r.

Source: the WY representation of DeltaNet, arXiv:2406.06484, for two columns; RWKV-7, arXiv:2503.14456.
"""
