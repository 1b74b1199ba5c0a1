"""Decayed gram of the keys times the write strength, for every chunk, in one launch.

    L[r, s] = beta_r sum_d k[r, d] k[s, d] exp(g[s+1, d] + ... + g[r, d])     s < r, else 0

(I + L)^-1 maps a chunk's residuals, times beta, to its written values: the UT transform of DeltaNet, arXiv:2406.06484.
"""
