"""Each segment's affine map of its entering state, S -> M S + H, serial over its chunks.

    [H | M]      the state after `scan` on V + K value columns without output: values [v | 0], from [S0 | I], where S0
                 is zero unless the sequence begins here
    c            the gradient after the reverse half of `scan_bwd` from zero, or from the final state's where the
                 sequence ends here; M is known by then

States are then folded from segment to segment without their tokens (docs/algorithm.md, section 9).
"""
