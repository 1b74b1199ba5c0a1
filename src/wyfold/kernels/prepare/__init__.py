"""Chunk factors that do not depend on the state, in one launch, parallel over chunks.

For rows r, s of one chunk and one value head, with J and P the decayed grams of `tile.decay.decayed_grams`:

    A = (I + diag(beta) J)^-1,   E = A^T (k exp(G_last - G)),   F = P A

`load` cuts tokens into tiles, and applies norm, gate activation and beta sigmoid (docs/algorithm.md, section 2). `fold`
computes the factors. Row r of A, F, J or P does not depend on rows after r.

Source: the UT transform of DeltaNet, arXiv:2406.06484; scalar decay, arXiv:2412.06464; channel decay, arXiv:2510.26692.
The folded form moves A to the other side once: E and F are bounded whenever beta |k|^2 <= 2, so no large number is
rounded.
"""
