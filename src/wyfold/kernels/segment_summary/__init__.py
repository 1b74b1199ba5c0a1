"""Every segment as an affine map of the state that enters it, S -> M S + H, serial over its chunks.

    [H | M]      the state after `scan` on V + K value columns without output: values [v | 0], from [S0 | I], where S0
                 is zero unless the sequence begins here
    c            the gradient after the reverse half of `scan_bwd` from zero, or from the final state's where the
                 sequence ends here; M is known by then

so what crosses from segment to segment is folded without its tokens (docs/algorithm.md, section 9).
"""
