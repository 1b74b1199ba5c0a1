"""Gradients of every chunk from the borders, parallel over chunks (docs/algorithm.md, section 7).

    N = A (beta R)          written values        dR = beta X
    dL = -stril(X N^T)      dJ = beta dL          dP = tril(do N^T)
    dv = dR                 dbeta = <X, e>,       e = R - J N = N / beta

and dq, dk, dg through the grams and through the decayed reads and writes of the state. dL is the adjoint of
the linear solve: with N available, the usual sandwich A^T dA A^T is one product. `unload` then applies the adjoints of
norm, activation and grouping.
"""
