"""Every public operator as a plain loop over tokens, written only from the papers and the public docstrings.

Sources: DeltaNet (arXiv:2406.06484), Gated DeltaNet (arXiv:2412.06464), Kimi Linear (arXiv:2510.26692), TTT
(arXiv:2407.04620), GLA (arXiv:2312.06635), DeltaProduct (arXiv:2502.10297), RWKV-7 (arXiv:2503.14456), PaTH attention
(arXiv:2505.16381). The loops were neither derived from the package's reference or implementations nor compared with
them while they were written, so they do not share an error with them. `linear` and `path` came later, when the
reference was known: `path` carries queries back, where the reference carries keys forward.

All tensors are float64. Gradients come from autograd through the loops. `at(x)` marks a rounding slot: an intermediate
result that any floating-point implementation has to round. The loops pass every product of a sum through one. By
default a slot returns its argument; `rounding.py` perturbs it to measure how rounding errors propagate.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Slot = Callable[..., Tensor]


def exact(x: Tensor, *_: Tensor) -> Tensor:
    """A slot without rounding."""
    return x


exact.probing = False  # type: ignore[attr-defined]


# Elementwise operators


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). Autograd through `torch.sigmoid` would take s (1 - s), which cancels where x is large."""
    positive = x >= 0
    e = torch.exp(torch.where(positive, -x, x))
    return torch.where(positive, 1 / (1 + e), e / (1 + e))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), without overflow."""
    positive = x >= 0
    return torch.where(positive, x, 0.0) + torch.log1p(torch.exp(torch.where(positive, -x, x)))


def rows_to_unit(x: Tensor, eps: float = 1e-6, at: Slot = exact) -> Tensor:
    """x / sqrt(sum x^2 + eps)."""
    square = at(at(x * x).sum(-1, keepdim=True) + eps)
    return at(x * at(torch.rsqrt(square)))


def sigmoid_strength(x: Tensor, scale: float = 1.0, at: Slot = exact) -> Tensor:
    """scale * sigmoid(x)."""
    return at(scale * at(sigmoid(at(x))))


def log_gate(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None = None,
    *,
    channels: bool,
    at: Slot = exact,
) -> Tensor:
    """-exp(A_log) softplus(g + dt_bias), or lower_bound * sigmoid(exp(A_log) (g + dt_bias)).

    g is [..., HV], or [..., HV, K] with `channels`; the rate exp(A_log) is one number for each head.
    """
    x = at(g)
    if dt_bias is not None:
        x = at(x + at(dt_bias.reshape(g.shape[-2:] if channels else g.shape[-1:]).expand(g.shape)))
    rate = torch.ones((), dtype=g.dtype)
    if A_log is not None:
        flat = A_log.reshape(-1)
        rate = at(torch.exp((flat[:, None] if channels else flat).expand(g.shape)))
    if lower_bound is None:
        return at(-rate * at(softplus(x)))
    return at(lower_bound * at(sigmoid(at(rate * x))))


def norm_and_gate(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "swish",
    eps: float = 1e-6,
    norm_before_gate: bool = True,
    at: Slot = exact,
) -> Tensor:
    """(rms(x) weight + bias) act(g), or rms(x act(g)) weight + bias."""
    gate = at(sigmoid(g))
    if activation != "sigmoid":
        gate = at(g * gate)
    shift = torch.zeros((), dtype=x.dtype) if bias is None else at(bias.expand(x.shape))

    def rms(z: Tensor) -> Tensor:
        return at(z * at(torch.rsqrt(at(at(z * z).sum(-1, keepdim=True) / z.shape[-1] + eps))))

    if norm_before_gate:
        return at(at(at(rms(x) * weight) + shift) * gate)
    return at(at(rms(at(x * gate)) * weight) + shift)


def documents(tokens: int, cu_seqlens: Tensor | None) -> Iterator[slice]:
    """The token ranges that start from separate states: all tokens of every row, or each packed sequence."""
    if cu_seqlens is None:
        yield slice(0, tokens)
        return
    bounds = cu_seqlens.tolist()
    for first, last in itertools.pairwise(bounds):
        yield slice(first, last)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    at: Slot = exact,
) -> tuple[Tensor, Tensor]:
    """y[t] = act(bias + sum_i weight[:, i] x[t - W + 1 + i]) + residual[t], and each sequence's latest inputs."""
    B, T, D = x.shape
    W = weight.shape[1]
    size = W - 1 if initial_state is None else initial_state.shape[-1]
    y, states = torch.zeros_like(x), []
    for n, span in enumerate(documents(T, cu_seqlens)):
        rows = x[:, span]
        if initial_state is None:
            before = x.new_zeros(B, size, D)
        else:
            before = (initial_state if cu_seqlens is None else initial_state[n : n + 1]).mT
        history = torch.cat([before, rows], 1)
        outputs = []
        for t in range(rows.shape[1]):
            window = history[:, size + t - W + 1 : size + t + 1]
            total = at(window * weight.T).sum(1)
            if bias is not None:
                total = total + at(bias.expand(total.shape))
            total = at(total)
            if activation is not None:
                total = at(total * at(sigmoid(total)))
            outputs.append(total)
        if outputs:
            block = torch.stack(outputs, 1)
            if residual is not None:
                block = at(block + at(residual[:, span]))
            y = torch.cat([y[:, : span.start], block, y[:, span.stop :]], 1)
        states.append(history[:, history.shape[1] - size :].mT)
    return y, torch.cat(states)


# Triangles


def decayed_gram(
    k: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
    at: Slot = exact,
) -> Tensor:
    """L[r, s] = beta_r sum_d k[r, d] k[s, d] exp(g[s+1, d] + ... + g[r, d]) for s < r within a chunk."""
    B, T = k.shape[:2]
    HV = beta.shape[-1]
    k = k.repeat_interleave(HV // k.shape[2], 2)
    if g is not None and g.ndim == 3:
        g = g[..., None]
    rows = k.new_zeros(B, T, HV, chunk_size)
    for span in documents(T, cu_seqlens):
        for t in range(span.start, span.stop):
            first = span.start + (t - span.start) // chunk_size * chunk_size
            if t == first:
                continue
            products = at(k[:, t, None] * k[:, first:t])  # [B, s, HV, K]
            if g is not None:
                exponent = torch.stack([g[:, s + 1 : t + 1].sum(1) for s in range(first, t)], 1)
                mass = exponent.nan_to_num(neginf=0.0).abs()
                if at is not exact:
                    mass = at.exponent_mass(mass, g[:, None, first : t + 1])
                products = products * torch.exp(at(exponent, mass.expand(exponent.shape)))
            rows[:, t, :, : t - first] = at(beta[:, t, None] * at(products).sum(-1)).mT
    return rows


def inverse(A: Tensor, *, cu_seqlens: Tensor | None = None, at: Slot = exact) -> Tensor:
    """X[r, :] = I[r, :] - sum_{s<r} A[r, s] X[s, :], chunk by chunk."""
    B, T, H, C = A.shape
    X = A.new_zeros(B, T, H, C)
    for span in documents(T, cu_seqlens):
        for t in range(span.start, span.stop):
            first = span.start + (t - span.start) // C * C
            r = t - first
            X[:, t, :, r] = 1.0
            if r:
                X[:, t] -= at(A[:, t, :, :r].mT[..., None] * X[:, first:t]).sum(1)
            X[:, t] = at(X[:, t])
    return X


# The delta rules


def delta_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    S: Tensor,
    scale: float,
    at: Slot = exact,
    chunk: int = 64,
) -> tuple[list[Tensor], list[Tensor]]:
    """The recurrence over the tokens of one range: outputs, and the state after each token.

    Args:
        q: [B, T, HV, K], as k: one row for every value head.
        v: [B, T, HV, V].
        g: [B, T, HV, 1] or [B, T, HV, K], or None.
        beta: [B, T, HV].
        S: [B, HV, K, V].
        scale: Factor of q.
        at: Rounding slot.
        chunk: For probing slots only: tokens over which an implementation may sum writes instead of reading the state.
    """
    outputs, states = [], []
    B, HV, _, V = S.shape
    written = Written(S) if at.probing else None  # type: ignore[attr-defined]
    for t in range(q.shape[1]):
        if written is not None and t % chunk == 0:
            written = Written(S)
        if g is not None:
            decay = at(torch.exp(g[:, t]))[..., None]  # [B, HV, 1 or K, 1]
            S = at(decay * S)
            if written is not None:
                written.decay(decay)
        key, query, strength = k[:, t, ..., None], q[:, t, ..., None], beta[:, t, :, None]
        predicted = at(S * key).sum(-2)  # S^T k
        if written is not None:
            predicted = at(predicted, written.mass(key))
        write = at(at(strength.expand(B, HV, V)) * v[:, t]) - at(at(strength.expand(B, HV, V)) * predicted)
        write = at(write)
        S = at(S + at(key * write[..., None, :]))
        if written is not None:
            written.add(key, write)
        out = at(scale * at(S * query).sum(-2))
        if written is not None:
            out = at(out, abs(scale) * written.mass(query))
        outputs.append(out)
        states.append(S)
    return outputs, states


class Written:
    """The state as a chunkwise form reads it: a sum of the initial state and the decayed write of each token."""

    def __init__(self, S: Tensor) -> None:
        self.entering = S.detach().abs()
        self.keys: Tensor | None = None  # [B, HV, tokens, K]
        self.values: Tensor | None = None  # [B, HV, tokens, V]

    def copy(self) -> "Written":
        other = Written(self.entering)
        other.keys, other.values = self.keys, self.values
        return other

    def decay(self, factor: Tensor) -> None:
        factor = factor.detach()
        self.entering = factor * self.entering
        if self.keys is not None:
            self.keys = self.keys * factor.mT

    def add(self, key: Tensor, write: Tensor) -> None:
        row, value = key.detach().mT, write.detach()[..., None, :]
        self.keys = row if self.keys is None else torch.cat([self.keys, row], -2)
        self.values = value if self.values is None else torch.cat([self.values, value], -2)

    def mass(self, vector: Tensor) -> Tensor:
        """Root of the sum of squares of the terms of (sum of writes)^T vector, [B, HV, V]."""
        vector = vector.detach()
        total = ((self.entering * vector) ** 2).sum(-2)
        if self.keys is not None:
            total = total + (((self.keys @ vector) * self.values) ** 2).sum(-2)
        return total.sqrt()


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    checkpoint_every: int | None = None,
    checkpoint_offsets: list[int] | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    at: Slot = exact,
    seen: dict[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """DeltaNet, GDN (g: [B, T, HV]) and KDA (g: [B, T, HV, K]): o, final states, states between.

    `seen` collects what enters the recurrence: "q", "k", "g", "beta" after norms and activations.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    channels = g is not None and g.ndim == 4
    scale = K**-0.5 if scale is None else scale
    q, k, v = at(q), at(k), at(v)
    if use_qk_l2norm_in_kernel:
        q, k = rows_to_unit(q, at=at), rows_to_unit(k, at=at)
    beta = torch.ones(B, T, HV, dtype=q.dtype) if beta is None else at(beta)
    if use_beta_sigmoid_in_kernel:
        beta = sigmoid_strength(beta, 2.0 if allow_neg_eigval else 1.0, at=at)
    if g is not None:
        if use_gate_in_kernel:
            g = log_gate(g, A_log, dt_bias, lower_bound, channels=channels, at=at)
        if safe_gate:
            g = g.clamp(min=-5.0 if lower_bound is None else lower_bound)
    if seen is not None:
        seen |= {"q": q, "k": k, "beta": beta} | ({} if g is None else {"g": g})
        for x in seen.values():
            if x.requires_grad:
                x.retain_grad()
    gate = None
    if g is not None:
        gate = getattr(at, "log_gates", lambda x: x)(g)
        gate = gate if channels else gate[..., None]
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))

    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    S0 = v.new_zeros(N, HV, K, V) if initial_state is None else at(initial_state)
    if initial_state is not None and state_v_first:
        S0 = S0.mT
    outputs, finals, between = [], [], []
    for n, span in enumerate(documents(T, cu_seqlens)):
        S = S0 if cu_seqlens is None else S0[n : n + 1]
        here = None if gate is None else gate[:, span]
        o, states = delta_tokens(q[:, span], k[:, span], v[:, span], here, beta[:, span], S, scale, at)
        outputs += o
        finals.append(states[-1] if states else S)
        if checkpoint_every:
            between.append(states[checkpoint_every - 1 :: checkpoint_every])
    outputs += [v.new_zeros(B, HV, V)] * (T - len(outputs))
    out = torch.stack(outputs, 1) if outputs else v.new_zeros(B, 0, HV, V)
    final = torch.cat(finals)
    kept = None
    if checkpoint_every:
        kept = v.new_zeros(B, T // checkpoint_every, HV, K, V)
        for n, states in enumerate(between):
            first = 0 if checkpoint_offsets is None else checkpoint_offsets[n]
            for i, S in enumerate(states):
                kept[:, first + i] = S.detach()
        kept = kept if cu_seqlens is None else kept[0]
    if state_v_first:
        final, kept = final.mT, None if kept is None else kept.mT
    return out, final, kept


# Rules that erase along another vector than they write, several times a token, or not at all


class Update(NamedTuple):
    """What a token does to the state: S <- S + b (S^T a)^T + k v^T. Nothing is erased without a.

    Attributes:
        a, b, k: [B, T, HV, K]; a and b may be None.
        v: [B, T, HV, V].
    """

    a: Tensor | None
    b: Tensor | None
    k: Tensor
    v: Tensor


def linear(
    q: Tensor,
    updates: Sequence[Update],
    g: Tensor | None,
    *,
    before: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    at: Slot = exact,
    seen: dict[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """o_t = scale S_t^T q_t and the final states, where a token decays the state and then applies its updates in turn.

    Args:
        q: [B, T, HV, K].
        updates: Of every token, in order.
        g: [B, T, HV] or [B, T, HV, K] log decays, or None.
        before: Whether a reads the state before the token's decay; then there is one update.
        seen: Collects what enters the recurrence.
    """
    B, T, HV, K = q.shape
    V = updates[0].v.shape[-1]
    scale = K**-0.5 if scale is None else scale
    if seen is not None:
        seen |= {"q": q} | ({} if g is None else {"g": g})
        for i, update in enumerate(updates):
            seen |= {f"{name}{i}": x for name, x in zip("abk", update) if x is not None}
        for x in seen.values():
            if x.requires_grad:
                x.retain_grad()
    gate = None if g is None else getattr(at, "log_gates", lambda x: x)(g)
    gate = gate if gate is None or gate.ndim == 4 else gate[..., None]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    S0 = q.new_zeros(N, HV, K, V) if initial_state is None else at(initial_state)
    if initial_state is not None and state_v_first:
        S0 = S0.mT
    outputs, finals = [], []
    for n, span in enumerate(documents(T, cu_seqlens)):
        S = S0 if cu_seqlens is None else S0[n : n + 1]
        here = [Update(*(None if x is None else x[:, span] for x in update)) for update in updates]
        outputs += linear_tokens(
            q[:, span], here, None if gate is None else gate[:, span], S, before, scale, finals, at
        )
    outputs += [q.new_zeros(B, HV, V)] * (T - len(outputs))
    out = torch.stack(outputs, 1) if outputs else q.new_zeros(B, 0, HV, V)
    final = torch.cat(finals)
    return out, final.mT if state_v_first else final


def linear_tokens(
    q: Tensor,
    updates: Sequence[Update],
    g: Tensor | None,
    S: Tensor,
    before: bool,
    scale: float,
    finals: list[Tensor],
    at: Slot,
    chunk: int = 64,
) -> list[Tensor]:
    """The recurrence of `linear` over the tokens of one range, whose final state is added to `finals`."""
    outputs = []
    written = Written(S) if at.probing else None  # type: ignore[attr-defined]
    for t in range(q.shape[1]):
        if written is not None and t % chunk == 0:
            written = Written(S)
        entering, early = S, written
        if written is not None and before:
            early = written.copy()
        if g is not None:
            decay = at(torch.exp(g[:, t]))[..., None]
            S = at(decay * S)
            if written is not None:
                written.decay(decay)
        for a, b, k, v in updates:
            if a is not None and b is not None:
                row, column = a[:, t, ..., None], b[:, t, ..., None]
                read = at((entering if before else S) * row).sum(-2)
                read = at(read) if early is None else at(at(read), early.mass(row))
                S = at(S + at(column * read[..., None, :]))
                if written is not None:
                    written.add(column, read)
            S = at(S + at(k[:, t, ..., None] * v[:, t, :, None]))
            if written is not None:
                written.add(k[:, t, ..., None], v[:, t])
            early = written
        query = q[:, t, ..., None]
        out = at(scale * at(S * query).sum(-2))
        outputs.append(out if written is None else at(out, abs(scale) * written.mass(query)))
    finals.append(S)
    return outputs


# PaTH attention


def path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    gate_scaled: bool = True,
    cu_seqlens: Tensor | None = None,
    at: Slot = exact,
) -> Tensor:
    """softmax_j(scale q_i^T H_i .. H_{j+1} k_j + s (g_{j+1} + .. + g_i)) over the values, H_t = I - beta_t w_t w_t^T.

    Each query is carried back through the reflections. q has the heads of g, the others may have fewer.
    """
    B, T, HQ, K = q.shape
    scale = K**-0.5 if scale is None else scale
    k, v, w = (x.repeat_interleave(HQ // k.shape[2], 2) for x in (k, v, w))
    beta = beta.repeat_interleave(HQ // beta.shape[2], 2)
    o = []
    for span in documents(T, cu_seqlens):
        for i in range(span.start, span.stop):
            x, decay, logits = q[:, i], q.new_zeros(B, HQ), []
            for j in range(i, span.start - 1, -1):
                product = at(scale * at(at(x * k[:, j]).sum(-1)))
                logits.append(at(product + at((scale if gate_scaled else 1.0) * decay)))
                along = at(beta[:, j] * at(at(x * w[:, j]).sum(-1)))
                x = at(x - at(along[..., None] * w[:, j]))
                decay = decay if g is None else at(decay + g[:, j])
            raised = torch.stack(logits, 1)
            raised = at(torch.exp(raised - raised.detach().amax(1, keepdim=True)))
            weights = at(raised / at(raised.sum(1, keepdim=True)))
            o.append(at(at(weights[..., None] * v[:, span.start : i + 1].flip(1)).sum(1)))
    o += [v.new_zeros(B, HQ, v.shape[-1])] * (T - len(o))
    return torch.stack(o, 1) if o else v.new_zeros(B, 0, HQ, v.shape[-1])


# TTT-Linear


def layer_norm(z: Tensor, eps: float, at: Slot = exact) -> tuple[Tensor, Tensor]:
    """Rows at mean 0 and variance 1, and the reciprocal of their standard deviation."""
    centred = at(z - at(at(z).sum(-1, keepdim=True) / z.shape[-1]))
    inverse_deviation = at(torch.rsqrt(at(at(centred * centred).sum(-1, keepdim=True) / z.shape[-1] + eps)))
    return at(centred * inverse_deviation), inverse_deviation


def inner_gradient(z: Tensor, w: Tensor, b: Tensor, target: Tensor, eps: float, at: Slot = exact) -> Tensor:
    """Gradient in z of 1/2 |w LN(z) + b - target|^2."""
    normed, inverse_deviation = layer_norm(z, eps, at)
    error = at(at(at(w.expand(z.shape)) * normed) + at(at(b.expand(z.shape)) - target))
    back = at(error * w)
    mean = at(back).sum(-1, keepdim=True) / z.shape[-1]
    along = at(at(back * normed).sum(-1, keepdim=True) / z.shape[-1])
    return at(at(at(back - mean) - at(normed * along)) * inverse_deviation)


def step_size(eta: Tensor | float | None, like: Tensor) -> Tensor:
    """[B, T, HV, 1] of a step given as a number, [B, T, HV] or [B, T, HV, 1]."""
    if not isinstance(eta, Tensor):
        return like.new_full((*like.shape[:3], 1), 1.0 if eta is None else float(eta))
    return eta if eta.ndim == 4 else eta[..., None]


class TTTPlace:
    """Position of one sequence: matrix and bias at the mini-batch's start, its gradient sums so far, tokens in it."""

    def __init__(self, S: Tensor, c: Tensor, G: Tensor | None = None, a: Tensor | None = None, position: int = 0):
        self.S, self.c = S, c
        self.G = torch.zeros_like(S) if G is None else G
        self.a = torch.zeros_like(c) if a is None else a
        self.position = position


def ttt_tokens(
    place: TTTPlace,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor,
    eta_col: Tensor,
    *,
    residual: str,
    scale: float,
    eps: float,
    chunk_size: int,
    at: Slot = exact,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Outputs of all tokens, and the weights after the last one; advances `place`. Tensors are [B, T, HV, ...]."""
    outputs = []
    S, c = place.S, place.c
    for t in range(q.shape[1]):
        query, key = q[:, t, ..., None], k[:, t, ..., None]
        z = at(at(at(place.S * key).sum(-2) + place.c[..., 0, :]))
        n = inner_gradient(z, w, b, at(v[:, t] - k[:, t]), eps, at)
        n = at(n * at(eta_col[:, t].expand(n.shape)))
        place.G = at(place.G + at(key * n[..., None, :]))
        place.a = at(place.a + n[..., None, :])
        place.position += 1
        step = eta[:, t, :, None]
        S = at(place.S - at(at(step.expand(place.G.shape)) * place.G))
        c = at(place.c - at(at(step.expand(place.a.shape)) * place.a))
        h = at(at(scale * at(S * query).sum(-2)) + c[..., 0, :])
        normed, _ = layer_norm(h, eps, at)
        base = h if residual == "o" else q[:, t]
        outputs.append(at(base + at(at(at(w.expand(h.shape)) * normed) + at(b.expand(h.shape)))))
        if place.position == chunk_size:
            place.S, place.c, place.position = S, c, 0
            place.G, place.a = torch.zeros_like(S), torch.zeros_like(c)
    return outputs, S, c


def ttt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    *,
    eta_col: Tensor | float | None = None,
    residual: str = "o",
    scale: float | None = None,
    eps: float = 1e-6,
    chunk_size: int = 16,
    initial_state: Tensor | None = None,
    initial_state_bias: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    at: Slot = exact,
) -> tuple[Tensor, Tensor, Tensor]:
    """`chunk_ttt_linear`: o, and the weights after every sequence's last token."""
    B, T, _, K = q.shape
    HV = v.shape[2]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    S0 = v.new_zeros(N, HV, K, K) if initial_state is None else at(initial_state)
    S0 = S0.mT if initial_state is not None and state_v_first else S0
    c0 = v.new_zeros(N, HV, 1, K) if initial_state_bias is None else at(initial_state_bias)
    outputs, matrices, biases = [], [], []
    tokens = ttt_arguments(q, k, v, w, b, eta, eta_col, at)
    options = {"residual": residual, "scale": K**-0.5 if scale is None else scale, "eps": eps, "chunk_size": chunk_size}
    for n, span in enumerate(documents(T, cu_seqlens)):
        rows = slice(None) if cu_seqlens is None else slice(n, n + 1)
        place = TTTPlace(S0[rows], c0[rows])
        o, S, c = ttt_tokens(place, *tokens(span), **options, at=at)
        outputs += o
        matrices.append(S)
        biases.append(c)
    outputs += [v.new_zeros(B, HV, K)] * (T - len(outputs))
    out = torch.stack(outputs, 1) if outputs else v.new_zeros(B, 0, HV, K)
    S = torch.cat(matrices)
    return out, S.mT if state_v_first else S, torch.cat(biases)


def ttt_arguments(q, k, v, w, b, eta, eta_col, at: Slot) -> Callable[[slice], tuple[Tensor, ...]]:
    """Arguments of `ttt_tokens` for a range of tokens."""
    group = v.shape[2] // q.shape[2]
    q, k = (at(x).repeat_interleave(group, 2) for x in (q, k))
    v = at(v)
    eta, eta_col = at(step_size(eta, v)), at(step_size(eta_col, v))
    w, b = at(w), at(b)
    return lambda span: (q[:, span], k[:, span], v[:, span], w, b, eta[:, span], eta_col[:, span])


def ttt_resumed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    *,
    eta_col: Tensor | float | None = None,
    residual: str = "o",
    scale: float | None = None,
    eps: float = 1e-6,
    chunk_size: int = 16,
    state: tuple[Tensor, ...] | None = None,
    cu_seqlens: Tensor | None = None,
    at: Slot = exact,
) -> tuple[Tensor, list[Tensor]]:
    """`fused_recurrent_ttt_linear`: o and [state, bias, grad, bias_grad, position] of every sequence.

    Each document of packed rows, and each row of a batch, runs separately, because each has another position.
    """
    B, T, _, K = q.shape
    HV = v.shape[2]
    tokens = ttt_arguments(q, k, v, w, b, eta, eta_col, at)
    options = {"residual": residual, "scale": K**-0.5 if scale is None else scale, "eps": eps, "chunk_size": chunk_size}
    spans = [(n, slice(0, T)) for n in range(B)]
    if cu_seqlens is not None:
        spans = [(0, span) for span in documents(T, cu_seqlens)]
    rows: list[list[Tensor]] = [[] for _ in range(B)]
    places = []
    for n, (row, span) in enumerate(spans):
        if state is None:
            place = TTTPlace(v.new_zeros(1, HV, K, K), v.new_zeros(1, HV, 1, K))
        else:
            place = TTTPlace(*(at(x[n : n + 1]) for x in state[:4]), position=int(state[4][n]))
        own = [x[row : row + 1] if x.ndim == 4 else x for x in tokens(span)]
        rows[row] += ttt_tokens(place, *own, **options, at=at)[0]
        places.append(place)
    out = []
    for row in rows:
        row = row + [v.new_zeros(1, HV, K)] * (T - len(row))
        out.append(torch.stack(row, 1) if row else v.new_zeros(1, 0, HV, K))
    final = [torch.cat([getattr(place, name) for place in places]) for name in ("S", "c", "G", "a")]
    return torch.cat(out), [*final, torch.tensor([place.position for place in places])]


# Serving: rows of a pool


def slot_of(number: int, pool: Tensor, pad_slot_id: int) -> int | None:
    return number if number > pad_slot_id and 0 <= number < len(pool) else None


def serve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    pool: Tensor,
    sequences: list[tuple[int, slice]],
    read: list[int],
    write: list[list[int]],
    *,
    every: int | None,
    state_v_first: bool,
    fresh: list[bool],
    at: Slot = exact,
    **options: object,
) -> tuple[Tensor, dict[int, Tensor], list[list[Tensor]]]:
    """The recurrence shared by `prefill`, `decode` and `verify`.

    Args:
        sequences: (row, tokens) of each sequence in q, k, v, g, beta.
        read: Slot of each initial state; -1 skips the sequence.
        write: `every` None: [the slot of its last state]. `every` 1: the slot after each token; -1 writes nothing.
        fresh: Whether it starts from zeros.

    Returns:
        o, new contents of slots, and all states of each sequence in the pool's layout.
    """
    out = torch.zeros_like(v)
    stored: dict[int, Tensor] = {}
    all_states: list[list[Tensor]] = []
    for n, (row, span) in enumerate(sequences):
        all_states.append([])
        if read[n] < 0:
            continue
        S = torch.zeros_like(pool[:1]) if fresh[n] else pool[read[n] : read[n] + 1]
        own = [None if x is None else x[row : row + 1, span] for x in (q, k, v, g, beta)]
        o, final, states = delta(
            *own, initial_state=S, state_v_first=state_v_first, checkpoint_every=1, at=at, **options
        )
        out[row, span] = o[0]
        all_states[-1] = list(states[0])
        if every is None:
            if write[n][0] >= 0:
                stored[write[n][0]] = final[0]
        else:
            for j, slot in enumerate(write[n][: states.shape[1]]):
                if slot >= 0:
                    stored[slot] = states[0, j]
    return out, stored, all_states


def serve_convolution(
    x: Tensor,
    pool: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sequences: list[tuple[int, slice]],
    slots: list[int],
    *,
    drafts: bool,
    accepted: list[int],
    fresh: list[bool],
    activation: str | None,
    at: Slot = exact,
) -> tuple[Tensor, dict[int, Tensor]]:
    """`conv1d_update` (drafts) and `conv1d_prefill`: y, and the leading columns of each slot that was written.

    x is [B, T, D], pool [slots, D, S]; a slot of -1 is skipped. The latest inputs of an empty sequence are those of its
    initial state, and a prefill stores them like any others.
    """
    W, width = weight.shape[1], pool.shape[-1]
    y, stored = torch.zeros_like(x), {}
    for n, (row, span) in enumerate(sequences):
        own = x[row : row + 1, span]
        if slots[n] < 0 or (drafts and own.shape[1] == 0):
            continue
        first = max(accepted[n], 1) - 1
        before = pool[slots[n] : slots[n] + 1, :, first : first + W - 1]
        if fresh[n]:
            before = torch.zeros_like(before)
        out, _ = convolution(own, weight, bias, initial_state=before, activation=activation, at=at)
        y[row, span] = out[0]
        history = torch.cat([before[0], own[0].T], -1)
        if drafts:
            stored[slots[n]] = history[:, 1 : 1 + width]
        else:
            stored[slots[n]] = F.pad(history[:, -(W - 1) :], (0, width - W + 1))
    return y, stored


def serve_ttt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    pool: tuple[Tensor, ...],
    slots: list[int],
    *,
    eta_col: Tensor | float | None = None,
    at: Slot = exact,
    **options: object,
) -> tuple[Tensor, dict[int, list[Tensor]]]:
    """`ttt_decode`: o of [N, 1, H, K] rows, and the five fields of each slot that was written."""
    out, stored = torch.zeros_like(v), {}
    for n, slot in enumerate(slots):
        if slot < 0:
            continue
        row = slice(n, n + 1)
        steps = [x[row] if isinstance(x, Tensor) else x for x in (eta, eta_col)]
        state = tuple(x[slot : slot + 1] for x in pool)
        o, after = ttt_resumed(q[row], k[row], v[row], w, b, steps[0], eta_col=steps[1], state=state, at=at, **options)
        out[n] = o[0]
        stored[slot] = [x[0] for x in after]
    return out, stored
