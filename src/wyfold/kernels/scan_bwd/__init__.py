"""Two independent scans of a part: states forward, and their gradients backward.

    forward half:  store S, then as `scan` without output; keeps R
    reverse half:  store dS (of the state leaving the chunk), then
                   X  = scale F^T do + E dS          dR = beta X
                   dS <- exp(G_last) dS + scale (q exp(G))^T do - (k exp(G))^T dR

The reverse half needs no forward state (docs/algorithm.md, section 7.1).
"""
