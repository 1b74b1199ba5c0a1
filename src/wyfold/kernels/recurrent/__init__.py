"""The token-by-token recurrence and its adjoint (docs/algorithm.md, section 2.1).

    S <- exp(g_t) S        e_t = v_t - S^T k_t        S <- S + beta_t k_t e_t^T        o_t = scale S^T q_t

The output is computed as `q^T S + (q.k) y`, with S decayed and y = beta e, so that one product serves k and q.
"""
