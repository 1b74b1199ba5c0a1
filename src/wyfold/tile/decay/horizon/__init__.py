"""The exact horizon: the chunks of a segment whose effect on its far end no number of the state's dtype can hold.

Under a scalar gate a chunk's transition has at most the norm of its decay, if |1 - beta |k|^2| <= 1 for its tokens.
Under a channel gate the norm is bounded by the operands of the chunk's step, whatever the keys and write strengths are.
A state that passes a run of chunks is then at most sqrt(K) times the largest number, times the product of these bounds.
It is lost if that is below half of the smallest number (docs/algorithm.md, section 9). Bounds are powers of two here.
"""
