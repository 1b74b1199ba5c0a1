"""TTT-Linear, mini-batch by mini-batch (docs/algorithm.md, section 8), and its adjoint.

A mini-batch of n rows takes all its inner gradients N at the state (S, c) it entered with:

    O = q S + c - e (Bm N)         out = O + w LN(O) + u          (residual "q": q, without its scale, + w LN(O) + u)
    S <- S - e_n k^T N             c <- c - e_n sum(N)            e_n: step size of the last row that holds a token

With per-token factors (`eta_col`), N stands for the inner gradient times its row's factor, here and in every kernel.
Only `tile/inner` handles the inner gradient without the factor.

An open mini-batch is incomplete at the end of a call, and a later call may continue it. Its state stays (S, c), and the
call returns the sums k^T N and sum(N) over its rows so far. In the continuing call its first rows are idle, and the
earlier sums are added to those of its new rows.

Source: Learning to (learn at test time), arXiv:2407.04620, the dual form of a mini-batch.
"""
