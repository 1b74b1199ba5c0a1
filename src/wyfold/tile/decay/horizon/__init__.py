"""The exact horizon: the chunks of a segment whose effect on its far end no number of the state's dtype can hold.

Under a scalar gate a chunk's transition has at most the norm of its decay, if |1 - beta |k|^2| <= 1 for its tokens. A
state that passes a run of chunks is then at most sqrt(K) times the largest number, times the product of their decays.
It is lost if that is below half of the smallest number (docs/algorithm.md, section 9). Decays are powers of two here.
"""
