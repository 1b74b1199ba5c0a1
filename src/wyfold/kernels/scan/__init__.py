"""States and outputs of a part, serial over its columns of chunks.

    R = v - (k exp(G)) S        y = beta R
    o = scale ((q exp(G)) S + F y)
    S <- exp(G_last) S + E^T y

Two dependent products per chunk, instead of three in the unfolded form (docs/algorithm.md, section 3).

If a call has slots, kernels read states from a pool's slots and write them back. Around the eager scan, `enter` and
`leave` of `state_pool` do so.
"""
