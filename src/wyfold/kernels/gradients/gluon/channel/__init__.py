"""`gradients` in Gluon for Hopper under a channel gate: bfloat16, chunks of 64, K = V = 128.

One program computes one half of the channels of one chunk and value head. It issues all loads before it computes. Its
shared memory lets two programs fit a multiprocessor (a test of `tests/compile/test_gradients_gluon.py`). Both programs
of a chunk compute the gradients of the grams, which need all of V. They are neighbours in the grid, so that the second
load of e, X and do can hit L2. Tiles are [channel, token], so a token's decay scales a left operand in registers, and
no decayed row is ever stored.

With several value heads to a key head, a program stores its dq and dk in bfloat16 over its half of the tile of S, which
only this program reads, dk behind dq. A second kernel (`heads`, beside this package) sums them in float32, in the order
of the heads, and applies the norm's adjoint.

**Letters** that docs/algorithm.md lacks, or uses for something else:

    dw          gradient of k as a column; dk' in docs/algorithm.md, section 7.2. dk is that of k as a row.
    x, y        products for the gate's gradient, per channel: x_r = q_r dq_r + k_r dk_r,  y_s = k_s dw_s
    P, J        in shared memory: the gradients of the grams P and J
    I, Q, E     decays, per channel: I of a token since its sub-chunk began, Q of a token until its sub-chunk ends, and
                E of a whole sub-chunk; not the identity, the queries and A^T Kt
    X           gradient of Y, as on that page; unrelated to x

**Sizes.** A program has BK = K / 2 = 64 channels and BT = 64 tokens. The code relies on BK = BT: accumulators over
channels and tokens, [BK, BT], share a layout and their zeros with the grams, [BT, BT]. Numbers in the code follow from
the tree below: 8 tokens of a sub-chunk, 16 of a quarter, 32 of half of the chunk, and 512 = 64 * 8 pairs (near) inside
sub-chunks.

**Tree of sub-chunks.** A chunk is 8 sub-chunks of 8 tokens. Two sub-chunks make a quarter of 16 tokens, the unit of one
tile. At each level, the rows of a block's later half and the columns of its earlier half exchange gradients across the
border (x) between the halves:

    sub-chunk       0   1   2   3   4   5   6   7
    quarter         [ 0   ] [ 1   ] [ 2   ] [ 3   ]

    level 32        [   earlier   ] x [   later   ]       quarters (2, 3) with (0, 1): 4 exchanges
    level 16        [ e   ]x[ l   ] [ e   ]x[ l   ]       quarters 1 with 0, and 3 with 2
    level 8         [e]x[l] [e]x[l] [e]x[l] [e]x[l]       odd with even sub-chunk, inside each quarter
    near pairs      [ ] [ ] [ ] [ ] [ ] [ ] [ ] [ ]       inside each sub-chunk

Each pair of a row r and a column s < r adds to dq_r and dk_r, the gradients of the row, and to dw_s, that of the
column. Levels run from far to near. Every row has one accumulator for dq and one for dk, and every column one for dw.
At each level the row accumulators of a later half first decay over the earlier half; then the exchange adds the pairs
with columns in the earlier half. The column accumulators of an earlier half first decay over the later half.

An exchange scales its operands by the decays between a token and the border, products of I, Q and E. Row accumulators
are multiplied by I, and column accumulators by Q, once at the end. So every decay is at most 1, and none is computed as
a difference of sums.

**The gate's gradient** of token i is a sum over the pairs with s < i <= r. The entering state counts as a column before
all tokens, the gradient of the leaving one as a row after them. Before an exchange, x of a later half holds the pairs
whose columns lie before the block. They span the whole earlier half, so the sum of x is added to each token of the
earlier half. In the same way y of an earlier half holds the pairs whose rows lie after the block, and its sum is added
to each token of the later half. The remaining pairs begin or end in the token's own sub-chunk, or lie inside it.

**Near pairs**, of one sub-chunk, are computed one by one in float32, as in `tile.decay.channel`. A warp then holds a
sub-chunk, and a thread all 8 rows of two of its channels.

**With the l2 norm**, q and k stay raw, as in `wyfold.kernels.gradients.gluon`. The pairs' gradients carry both norms,
and the gradients through the states carry the row's own norm. For a raw row u with normed row n = u/|u|, accumulators
then hold z = dn/|u| in place of dn. x and y do not change, since u z = n dn in every channel. The norm's adjoint,
du = z - u <u, z>/|u|^2, needs all channels: both programs store z, rounded, and their part of <u, z>, and
`wyfold_gradients_norm_gluon` follows. Of value heads in groups `heads` does both.

Rows past a sequence's end are zeroed. Inputs that TMA cannot read are copied, as in `wyfold.kernels.gradients.gluon`.
"""

from wyfold.kernels.gradients.gluon.channel.kernel import wyfold_gradients_channel_gluon
from wyfold.kernels.gradients.gluon.channel.launch import gradients
from wyfold.kernels.gradients.gluon.channel.norm import wyfold_gradients_norm_gluon

__all__ = ["gradients", "wyfold_gradients_channel_gluon", "wyfold_gradients_norm_gluon"]
