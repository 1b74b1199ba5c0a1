"""State and output of a part, serial over its columns of chunks.

    R = v - (k exp(G)) S        y = beta R
    o = scale ((q exp(G)) S + F y)
    S <- exp(G_last) S + E^T y

Two products depend on each other in a chunk, instead of the three of the unfolded form (docs/algorithm.md, section 3).

Kernels find states in the slots of a pool, and leave them there, if a call has some, as `enter` and `leave` of `slots`
do around the eager scan.
"""
