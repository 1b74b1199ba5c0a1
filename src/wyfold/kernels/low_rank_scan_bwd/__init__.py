"""States of a part of a diagonal-plus-low-rank rule forward again, and their gradients backward.

    forward     U = rows S0;    S1 as in `low_rank_scan`
    reverse     Z = E dS1;      dS0 = exp(G_last) dS1 + Q^T do + rows^T Z

The halves need nothing of each other. `do` includes the scale.
"""
