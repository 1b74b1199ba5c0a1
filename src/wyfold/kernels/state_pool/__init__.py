"""States out of the slots of a pool into one tensor, a row per sequence, and back, for what runs between the two.

enter    states[n] = pool[source[n]]        zeros where a sequence has no live slot or starts afresh
leave    pool[target[n]] = states[n]        and o = 0 for the tokens of sequences without a live slot

leave_between    pool[where[r]] = states[r]     of row r's sequence's states on the way, unless it was skipped
"""
