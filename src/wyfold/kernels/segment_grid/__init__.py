"""Where the segments of a call lie: each sequence cut by its own length, which only the device may know, in one launch.

length[n]    chunks of a segment of sequence n, `runtime.chunks.Cut`
first[n]     segments of the sequences before n
sequence[i]  the one that segment i is cut from; N past the last
cu[i]        first token of segment i in the buffer of all rows, and behind it the last one's end
"""
