"""Chunks and blocks of PaTH attention, before any query meets a key of another chunk.

Level 0, a chunk of C rows, L = diag(beta) stril(w w^T):

    A = (I + L)^-1      P = tril(q w^T)      J = stril(w k^T)      W = A diag(beta) w      E = A diag(beta) J
    q <- q - P W        k <- k - E^T w       Z = tril(q k^T) - P E

The map of a row x from the chunk's end to its start is x - (x w^T) W. Level 1, a block, from its last chunk to its
first, with R = I after the last:

    k <- k R^T          R <- R - (R w^T) W          and M = R at last
"""
