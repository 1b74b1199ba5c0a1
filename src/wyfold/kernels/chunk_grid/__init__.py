"""Chunk grid of a packed batch, in one launch, from boundaries that only the device knows.

cu[n]        n-th boundary, clamped to the buffer and to at least all boundaries before it; cu[0] = 0, cu[N+1] = T
first[n]     number of chunks of the sequences before n
sequence[c]  sequence of chunk c; N past the last boundary

If states are kept after every `every` tokens of a sequence, also

first_state[n]  number of such states of the sequences before n
"""
