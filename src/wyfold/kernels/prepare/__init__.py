"""Folded factors of every chunk, in one launch, parallel over chunks.

For rows r, s of one chunk and one value head, with J and P the decayed grams of `tile.decay.decayed_grams`:

    A = (I + diag(beta) J)^-1,   E = A^T (k exp(G_last - G)),   F = P A

`load` brings tokens to tiles and applies what may happen to them first (docs/algorithm.md, section 2); `fold` makes E
and F. Nothing in row r of A, F, J or P depends on rows after r.

Source: the UT transform of DeltaNet, arXiv:2406.06484; scalar decay, arXiv:2412.06464; channel decay, arXiv:2510.26692.
The folded form moves A to the other side once: E and F are bounded whenever beta |k|^2 <= 2, so nothing large is
rounded.
"""
