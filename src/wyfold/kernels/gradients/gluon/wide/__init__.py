"""`gradients` in Gluon for Hopper: no gate or a scalar one, bfloat16, chunks of 64, wide heads.

One program computes a chunk of one value head. q and k stay in shared memory, in slices of 64 channels. Everything else
passes through a ring of stages, in tiles of 64 value channels, which a producer warp loads by TMA:

    grams     e, X and do of every value tile: dP, dJ, dbeta and dv
    slices    for every slice of keys, S, dS, e, X and do of every value tile: dq and dk
    norm      with the l2 norm, q and k again, for its adjoint

So e, X and do are read once more for each slice, from L2. The arithmetic is that of `scalar`, whose functions for
tokens' numbers, pairs and gates this kernel shares. With the l2 norm, the gradients of normalised rows wait for their
dot products over all slices, rounded, in the memory of q and k.

With several value heads to a key head, a program stores its dq and dk over its tiles of e and X, which must be as
wide, once all slices have read them. `heads` adds them, as for `scalar`.
"""

from wyfold.kernels.gradients.gluon.wide.kernel import wyfold_gradients_wide_gluon

__all__ = ["wyfold_gradients_wide_gluon"]
