"""Where the chunks of a packed batch lie, from boundaries that only the device knows, in one launch.

cu[n]        the n-th boundary, raised to all before it and held inside the buffer; cu[0] = 0, cu[N+1] = T
first[n]     chunks of the sequences before n
sequence[c]  the one that holds chunk c; N past the last boundary

and, where states are kept after every `every` tokens of a sequence,

first_state[n]  such states of the sequences before n
"""
