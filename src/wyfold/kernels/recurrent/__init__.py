"""The recurrence itself, token by token, and its adjoint (docs/algorithm.md, section 2.1).

    S <- exp(g_t) S        e_t = v_t - S^T k_t        S <- S + beta_t k_t e_t^T        o_t = scale S^T q_t

The output is read as `q^T S + (q.k) y` with y = beta e from the decayed S, so that one product serves k and q.
"""
