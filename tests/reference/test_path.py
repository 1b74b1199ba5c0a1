"""The token loop of PaTH attention against its formula: products of reflections, written out."""

import torch

from wyfold import reference


def formula(q, k, v, w, beta, g, scale, gate):
    """One head; q, k, v, w [T, D], beta and g [T]."""
    T, K = k.shape
    H = [torch.eye(K, dtype=k.dtype) - beta[t] * torch.outer(w[t], w[t]) for t in range(T)]
    rows = []
    for i in range(T):
        logits = []
        for j in range(i + 1):
            row = q[i]
            for t in range(i, j, -1):
                row = row @ H[t]
            logits.append(scale * row @ k[j] + gate * g[j + 1 : i + 1].sum())
        rows.append(torch.stack(logits).softmax(0) @ v[: i + 1])
    return torch.stack(rows)


def drawn(T: int, H: int, HQ: int, K: int, V: int) -> list[torch.Tensor]:
    q, k, w = (torch.randn(1, T, heads, K, dtype=torch.float64) for heads in (HQ, H, H))
    v, beta = torch.randn(1, T, H, V, dtype=torch.float64), 2 * torch.rand(1, T, H, dtype=torch.float64)
    return [q, k, v, torch.nn.functional.normalize(w, dim=-1), beta, -torch.rand(1, T, HQ, dtype=torch.float64)]


def test_each_query_head_is_the_formula(float64_bounds):
    q, k, v, w, beta, g = drawn(9, 2, 4, 5, 3)
    for scaled in (True, False):
        o, _ = reference.path_attention(q, k, v, w, beta, g, scale=0.7, gate_scaled=scaled)
        for head in range(4):
            rows = (x[0, :, head // 2] for x in (k, v, w, beta))
            truth = formula(q[0, :, head], *rows, g[0, :, head], 0.7, 0.7 if scaled else 1.0)
            float64_bounds.output(f"head {head}", o[0, :, head], truth)


def test_without_reflections_it_is_softmax_attention(float64_bounds):
    q, k, v, w, beta, _ = drawn(9, 2, 2, 5, 3)
    o, _ = reference.path_attention(q, k, v, w, torch.zeros_like(beta))
    rows = (x.transpose(1, 2) for x in (q, k, v))
    truth = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2)
    float64_bounds.output("o", o, truth)


def test_packed_sequences_and_their_keys_are_those_of_single_calls():
    tensors = drawn(12, 2, 4, 5, 3)
    cu = torch.tensor([0, 4, 4, 5, 9])
    tensors[0][:, 9:] = torch.nan
    o, keys = reference.path_attention(*tensors, cu_seqlens=cu, use_cache=True)
    assert not o[:, 9:].any() and not keys[:, 9:].any()
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        alone = reference.path_attention(*(x[:, start:stop] for x in tensors), use_cache=True)
        assert torch.equal(o[:, start:stop], alone[0]) and torch.equal(keys[:, start:stop], alone[1])


def test_minus_infinity_hides_all_earlier_tokens():
    q, k, v, w, beta, g = drawn(9, 1, 1, 5, 3)
    g[:, 4] = -torch.inf
    o, _ = reference.path_attention(q, k, v, w, beta, g)
    later, _ = reference.path_attention(*(x[:, 4:] for x in (q, k, v, w, beta, g)))
    assert o.isfinite().all()
    assert torch.equal(o[:, 4:], later)
