"""A diagonal-plus-low-rank rule token by token, and its adjoint.

    r = S^T a_t        S <- exp(g_t) S        S <- S + b_t r^T + k_t v_t^T        o_t = scale S^T q_t

`a` reads before or after the decay (`tile.columns`). After it, `S^T (exp(g_t) a_t)` is read instead. The output is
computed as `S^T (exp(g_t) q) + (q.b) r + (q.k) v` with the entering S, so that one product serves a and q, and one
writes b r^T + k v^T.
"""
