"""`prepare` in Gluon for Hopper with a channel gate: one program per chunk and value head, 32 channels at a time.

**Rows in reach.** Let P be the running sum of log gates (base 2) from the start of a row's half of the chunk. The pair
of rows r and s <= r decays by 2^P[r] 2^-P[s], and by 2^(sum over the first half) more where s lies in the first half
and r in the second. Only -P may be positive. It is in reach up to 120 (HALF_REACH + HALF_SHIFT), 2.6 nats a token on
average. Then two exponentials per row and channel serve everything: rows 2^P k and 2^P q, rounded to bfloat16, meet
keys 2^-P k in two bfloat16 parts. The second half starts at the power of two next to the decay over the first one. So
the same rows, scaled by a power of two, are the rows of the scans, without another rounding: what a chunk's tokens read
of each other is decayed and rounded as what they read of the state. Keys of the first half are scaled likewise for rows
of the second, and E is computed from these keys. Factors lie between 2^-104 and 2^104.

**Rows out of reach**, after resets and strong gates. A row's way must not depend on later rows. So all rows before the
first one out of reach are computed as above, and a chunk that has others is computed once more, for those rows.
Sub-chunks have 16 rows, one warp each. Let P be the sum of a sub-chunk's gates after its first row, `first` the first
row's gate, and `rest` the sum over all rows after the first. The pair decays by

    2^P[r] 2^-P[s]                                     where both lie in one sub-chunk, or
    2^P[r] 2^(first + sums between) 2^(rest - P[s])    where s lies in an earlier one.

Pairs inside a warp's sub-chunk are TF32 products of operands in registers. For pairs with the three later sub-chunks,
the warp has 2^(rest - P[s]) k[s] in registers, multiplies it by the decay between the sub-chunks, one number per
channel, and reads the later rows from shared memory. One anchor serves -P up to REACH. Fifteen gates exceed that if
they average more than 5.08 nats; then further anchors follow, REACH apart. Rows are multiplied by 2^SHIFT more than the
formula has, and keys by as much less. REACH is 1 more than is used: see `_add_near_grams`.

Cost of a chunk. 64 KiB are loaded and 57 or 65 stored (gates in float32): 0.35 ms for 12,288 chunks at 4.3 TB/s. Each
multiprocessor computes 93 of these, so a chunk has 6,800 cycles at 1.8 GHz. Exponentials take 1,030 cycles of their
unit, products 1,050 between rows and 1,150 for E and F. A warp has 3,700 instructions, which each scheduler needs as
many cycles for. All of it may overlap, so memory bandwidth is the bound if programs hide each other's latency. Two
programs fit a multiprocessor: with three, at most 168 registers a thread, they spill and take longer.

Two programs hide little latency. So where all chunks are full, only as many programs are launched as fit the GPU at
once, and each loops over tiles. The gates of the next tile are loaded while the current one is inverted and folded, and
its k and q while results are stored. These stores are waited for only before the next sums are stored.

Shared memory: gates are loaded into a separate tile. After their sums are taken, that tile holds the scaled rows, 32
keys and 32 queries of the first half, then those of the second. (Out of reach: each sub-chunk's 2^P k above its 2^P q,
one slice of 32 channels after the other.) The memory of the sums P is reused for the bfloat16 pairs from which E is
computed, then for E, F and W. The memory of k and q is reused for both, decayed from the chunk's start, which are
stored, then for -U and P^T.
"""

from wyfold.kernels.prepare.gluon.channel.kernel import wyfold_prepare_channel_gluon
from wyfold.kernels.prepare.gluon.channel.launch import prepare

__all__ = ["prepare", "wyfold_prepare_channel_gluon"]
