"""Segment grid of a call, in one launch: each sequence is cut by its own length, which only the device may know.

length[n]    chunks per segment of sequence n, from `runtime.chunk_layout.Cut`
first[n]     number of segments of the sequences before n
sequence[i]  sequence of segment i; N past the last one
cu[i]        first token of segment i in the buffer of all rows; the last entry is the end of the last segment
"""
