"""Copies of states between the slots of a pool and a tensor with one row per sequence, around other launches.

enter    states[n] = pool[source[n]]        zeros if a sequence has no live slot or starts from zeros
leave    pool[target[n]] = states[n]        and o = 0 for the tokens of sequences without a live slot

leave_between    pool[where[r]] = states[r]     for intermediate states r of sequences that were not skipped
"""
