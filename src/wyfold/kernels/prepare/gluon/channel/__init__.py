"""`prepare` in Gluon for Hopper with a channel gate: one program per chunk and value head, 32 channels at a time.

Sub-chunks have 16 rows, one warp each. Let P be the running sum of a sub-chunk's log gates (base 2) after its first
row, `first` the first row's log gate, and `rest` the sum over all rows after the first. The pair of rows r and s <= r
decays by

    2^P[r] 2^-P[s]                                     where both lie in one sub-chunk, or
    2^P[r] 2^(first + sums between) 2^(rest - P[s])    where s lies in an earlier one,

so all pairs of a chunk take three exponentials per row and channel: of P, -P and rest - P. Pairs inside a warp's
sub-chunk are products of operands in registers. For pairs with the three later sub-chunks, the warp has 2^(rest - P[s])
k[s] in registers, multiplies it by the decay between the sub-chunks, one number per channel, and reads the later rows
from shared memory. Multiplied by other such numbers, the same two tiles give the decayed rows that the scans read, and
the keys from which E is computed.

Only -P may be positive. One anchor serves it up to REACH. Fifteen gates exceed that if they average more than 5.08
nats; then further anchors follow, REACH apart. Rows are multiplied by 2^SHIFT more than the formula has, and keys by as
much less, so keys keep as much of float32's range as with a reach of 96. REACH is 1 more than is used: see
`_add_near_grams`.

Cost of a chunk. 64 KiB are loaded and 57 or 65 stored (gates in float32): 0.35 ms for 12,288 chunks at 4.3 TB/s. Each
multiprocessor computes 93 of these, so a chunk has 6,800 cycles at 1.8 GHz. Exponentials take 1,540 cycles of their
unit. Products take 800 cycles in TF32 between sub-chunks, 700 inside them, and 1,150 for E and F. Shared memory takes
some 4,000, and instructions 4,400 a warp, if each scheduler issues one every cycle. All of it may overlap, so memory
bandwidth is the bound if programs hide each other's latency. Two programs fit a multiprocessor: with three, at most 168
registers a thread, they spill and take longer.

Two programs hide little latency. So where all chunks are full, only as many programs are launched as fit the GPU at
once, and each loops over tiles. The gates of the next tile are loaded while the current one is inverted and folded, and
its k and q while results are stored. These stores are waited for only before the next sums are stored.

Shared memory: gates are loaded into a separate tile. After their sums are taken, that tile holds each sub-chunk's 2^P k
above its 2^P q, one slice of 32 channels after the other, so that one product reads both. A slice of the sums P has 8
KiB, and those of k and q 4 each. The memory of the sums is reused for the bfloat16 pairs from which E is computed, then
for E, F and W. The memory of k and q is reused for both, decayed from the chunk's start, which are stored, then for -U
and P^T.
"""

from wyfold.kernels.prepare.gluon.channel.kernel import wyfold_prepare_channel_gluon
from wyfold.kernels.prepare.gluon.channel.launch import prepare

__all__ = ["prepare", "wyfold_prepare_channel_gluon"]
