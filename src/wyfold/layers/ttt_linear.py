"""TTT-Linear layer: the state is a linear model, trained on the sequence by gradient descent."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from wyfold.context_parallel.context import ContextParallel
from wyfold.kernels import table
from wyfold.layers.cache import LayerCache
from wyfold.layers.conv import ShortConvolution
from wyfold.layers.delta_net import grouped_heads
from wyfold.layers.initial import set_normal_initial
from wyfold.layers.layer_call import sequences
from wyfold.layers.rotary import rotate
from wyfold.ops.ttt_call import WIDEST
from wyfold.ops.ttt_linear import TTTState, chunk_ttt_linear, fused_recurrent_ttt_linear
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout


class TTTLinear(nn.Module):
    """TTT-Linear layer as published: each mini-batch of tokens takes one step of gradient descent on the state.

        qk, v = W x,   q = conv_q(qk),   k = conv_k(qk),   with rotary embeddings at the index p in the mini-batch
        eta[t] = max(1 / (1 + p) + token_step[p], 0),   eta_col[t] = base_step sigmoid(W_step x + b_step) / D
        y = W_o (layer_norm(q + w LN(S^T q + c) + b, over all heads) * gelu(W_gate x))

    Token t uses the step size eta[t] eta_col[s] for token s's gradient. Queries are not scaled. The initial state is
    learned. These are the layers of the paper's Mamba backbone. Those of its Transformer backbone have separate
    projections of q and k without a convolution (`conv_size=None`), and no gate (`gated=False`).

    Args:
        hidden_size: Width of x.
        num_heads: H, query and key heads.
        num_v_heads: HV, value heads, each with a state; a multiple of H. None: H.
        head_dim: D, width of queries, keys and values: from 1 to 128.
        head_v_dim: D or None: the inner model maps keys to values of their width.
        conv_size: Length of the two short convolutions. None: no convolution, and a separate projection of keys.
        mini_batch: Tokens whose gradients are taken at the same state: 16, 32 or 64, part of the model.
        base_step: Largest factor of a token's gradient, times D.
        rope_base: Longest wavelength of the rotation is about 2 pi rope_base tokens. None: no rotary embedding, as an
            odd head_dim needs.
        gated: Use an output gate.
        norm_eps: eps of the output norm and of the inner norm.
        backend: Backend of every operator in the layer. None: the best available one, which on CUDA is never "eager".

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A size or option is not supported by the operator.

    Source:
        Learning to (learn at test time), arXiv:2407.04620, sections 2.4 to 2.7; the step 1 / (1 + p) is that of the
        released models.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None = None,
        head_dim: int = 128,
        head_v_dim: int | None = None,
        conv_size: int | None = 4,
        *,
        mini_batch: int = 16,
        base_step: float = 1.0,
        rope_base: float | None = 10_000.0,
        gated: bool = True,
        norm_eps: float = 1e-6,
        backend: str | None = None,
    ):
        super().__init__()
        name = "TTTLinear"
        self.hidden_size = check.integer(name, "hidden_size", hidden_size, least=1)
        self.num_heads, self.num_v_heads = grouped_heads(name, num_heads, num_v_heads)
        check.any_width(name, "K", "head_dim", check.integer(name, "head_dim", head_dim, least=1), most=WIDEST)
        if head_v_dim is not None and check.integer(name, "head_v_dim", head_v_dim, least=1) != head_dim:
            raise ValueError(f"{name}: head_v_dim must be None or head_dim = {head_dim}, got {head_v_dim}")
        check.choice(name, "mini_batch", mini_batch, (16, 32, 64))
        check.flag(name, gated=gated)
        check.choice(name, "backend", backend, (None, *table.BACKENDS))
        self.head_dim, self.mini_batch, self.backend = head_dim, mini_batch, backend
        self.step_scale = check.number(name, "base_step", base_step) / head_dim
        self.rope_base = None if rope_base is None else check.number(name, "rope_base", rope_base)
        if self.rope_base is not None and self.rope_base <= 0:
            raise ValueError(f"{name}: rope_base must be > 0 or None, got {rope_base}")
        if self.rope_base is not None and head_dim % 2:
            raise ValueError(f"{name}: rope_base must be None with an odd head_dim, got {rope_base} with {head_dim}")
        self.eps = check.epsilon(name, norm_eps, name="norm_eps")
        self.key_size, self.value_size = num_heads * head_dim, self.num_v_heads * head_dim
        keys = self.key_size if conv_size is not None else 2 * self.key_size
        self.qkv = nn.Linear(hidden_size, keys + self.value_size, bias=False)
        self.conv: ShortConvolution | None = None
        if conv_size is not None:
            self.conv = ShortConvolution(2 * self.key_size, conv_size, bias=True, activation=None, backend=backend)
        self.step = nn.Linear(hidden_size, self.num_v_heads)
        self.token_step = nn.Parameter(torch.empty(mini_batch))
        self.w = nn.Parameter(torch.empty(self.num_v_heads, head_dim))
        self.b = nn.Parameter(torch.empty(self.num_v_heads, head_dim))
        self.start = nn.Parameter(torch.empty(self.num_v_heads, head_dim, head_dim))
        self.start_bias = nn.Parameter(torch.empty(self.num_v_heads, 1, head_dim))
        self.gate = nn.Linear(hidden_size, self.value_size, bias=False) if gated else None
        self.norm = nn.LayerNorm(self.value_size, eps=norm_eps)
        self.out = nn.Linear(self.value_size, hidden_size, bias=False)
        set_normal_initial(self.step, std=0.02)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise: identity inner norm, small initial state with zero bias, factors at half their maximum."""
        nn.init.ones_(self.w)
        nn.init.zeros_(self.b)
        nn.init.normal_(self.start, std=0.02)
        nn.init.zeros_(self.start_bias)
        nn.init.zeros_(self.token_step)
        self.step.reset_parameters()

    def forward(
        self,
        x: Tensor,
        *,
        layout: SequenceLayout | None = None,
        cache: LayerCache | None = None,
        cp_context: ContextParallel | None = None,
    ) -> Tensor:
        """Mix each sequence over time.

        Args:
            x: [B, T, hidden_size].
            layout: Boundaries of packed sequences, for which B is 1. No information crosses a boundary.
            cache: `LayerCache` with the fields of a `TTTState`, and with a convolution also "conv" [N, 2 H D, W-1]; the
                call continues from these, also inside a mini-batch, and replaces them. An empty cache starts new
                sequences. No gradient flows into tokens before an open mini-batch.
            cp_context: From `wyfold.cp.build_cp_context`, instead of layout and cache. x is this rank's shard of the
                tokens; sequences cross ranks between mini-batches. Each rank gets its partial gradient of every
                parameter.

        Returns:
            y: [B, T, hidden_size], dtype of x. Exact zeros past the last boundary.

        Raises:
            TypeError: x has another dtype than the parameters outside autocast, or cache is not a `LayerCache`.
            ValueError: x, layout and cache do not fit together.
        """
        HV, D = self.num_v_heads, self.head_dim
        state, bias = f"N {HV} {D} {D}", f"N {HV} 1 {D}"
        holds = {"state": state, "bias": bias, "grad": state, "bias_grad": bias, "position": "N"}
        if self.conv is not None:
            holds["conv"] = f"N {2 * self.key_size} S"
        N = sequences("TTTLinear", x, self.hidden_size, self.qkv, layout, cache, holds, cp_context)
        rows = self._rows(x, layout, cache, cp_context)
        if cache is None:
            start, start_bias = (s.expand(N, *s.shape) for s in (self.start, self.start_bias))
            o, _, _ = self._in_batches(rows, start, start_bias, layout, leaving=False, cp_context=cp_context)
        else:
            o = self._resume(rows, N, layout, cache)
        y = self.norm(o.flatten(2))
        if self.gate is not None:
            y = y * gelu(self.gate(x), approximate="tanh")
        if layout is not None or cp_context is not None:  # the norm's bias makes padding rows nonzero
            positions = layout.positions[None] if layout is not None else self._positions(x, cp_context)
            y = y.masked_fill((positions < 0)[..., None], 0)
        return cast(Tensor, self.out(y))

    def _positions(self, x: Tensor, cp_context: ContextParallel | None) -> Tensor:
        """[1, T] position of each token in its sequence."""
        if cp_context is None:
            return torch.arange(x.shape[1], device=x.device)[None]
        return cp_context.position_ids(x.device)

    def _rows(
        self, x: Tensor, layout: SequenceLayout | None, cache: LayerCache | None, cp_context: ContextParallel | None
    ) -> _TokenRows:
        qkv = self.qkv(x)
        qk, v = qkv.split([qkv.shape[-1] - self.value_size, self.value_size], dim=-1)
        if self.conv is not None:
            qk = self.conv(qk.repeat(1, 1, 2), layout=layout, cache=cache, cp_context=cp_context)
        q, k = qk.unflatten(-1, (2 * self.num_heads, self.head_dim)).chunk(2, dim=2)
        places = self._places(x, layout, cache, cp_context)
        if self.rope_base is not None:
            q, k = (rotate(part, places, self.rope_base, neighbours=True) for part in (q, k))
        wide = torch.promote_types(self.token_step.dtype, torch.float32)
        of_place = (1 / (places + 1).to(wide) + self.token_step.to(wide)[places]).clamp(min=0)
        return _TokenRows(
            q,
            k,
            v.unflatten(-1, (self.num_v_heads, self.head_dim)),
            of_place.unsqueeze(-1).expand(*x.shape[:2], self.num_v_heads),
            torch.sigmoid(self.step(x)) * self.step_scale,
        )

    def _places(
        self, x: Tensor, layout: SequenceLayout | None, cache: LayerCache | None, cp_context: ContextParallel | None
    ) -> Tensor:
        """[B, T] or [1, T] int64 index of each token in its mini-batch; undefined past the last boundary."""
        places = self._positions(x, cp_context) if layout is None else layout.positions[None]
        if cache is not None and "position" in cache:
            taken = cache["position"].to(torch.int64)
            places = places + (taken[:, None] if layout is None else taken[layout.sequence_ids][None])
        return places % self.mini_batch

    def _in_batches(
        self,
        rows: _TokenRows,
        state: Tensor,
        bias: Tensor,
        layout: SequenceLayout | None,
        *,
        leaving: bool,
        cp_context: ContextParallel | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run all rows in mini-batches, the last possibly short; return the output and, with `leaving`, the states."""
        return chunk_ttt_linear(
            rows.q,
            rows.k,
            rows.v,
            self.w,
            self.b,
            rows.eta,
            eta_col=rows.eta_col,
            residual="q",
            scale=1.0,
            eps=self.eps,
            chunk_size=self.mini_batch,
            initial_state=state,
            initial_state_bias=bias,
            output_final_state=leaving,
            cu_seqlens=layout,
            cp_context=cp_context,
            backend=self.backend,
        )

    def _by_token(self, rows: _TokenRows, state: TTTState, layout: SequenceLayout | None) -> tuple[Tensor, TTTState]:
        """Run all rows with the recurrent form, which leaves the last mini-batch open."""
        result = fused_recurrent_ttt_linear(
            rows.q,
            rows.k,
            rows.v,
            self.w,
            self.b,
            rows.eta,
            eta_col=rows.eta_col,
            residual="q",
            scale=1.0,
            eps=self.eps,
            chunk_size=self.mini_batch,
            state=state,
            output_final_state=True,
            cu_seqlens=layout,
            backend=self.backend,
        )
        return cast(tuple[Tensor, TTTState], result)

    def _resume(self, rows: _TokenRows, N: int, layout: SequenceLayout | None, cache: LayerCache) -> Tensor:
        """Continue from the cache: finish the open mini-batch, run whole ones, then leave the last one open."""
        T = rows.q.shape[1]
        begun = "state" in cache
        state = TTTState(*(cache[name] for name in TTTState._fields)) if begun else self._opened(N)
        if layout is not None:
            lead = T  # the chunk form would close the last mini-batch of each packed sequence
        else:
            lead = self._until_closed(state, T) if begun else 0
        whole = (T - lead) // self.mini_batch * self.mini_batch
        outputs = []
        if lead > 0:
            o, state = self._by_token(rows.between(0, lead), state, layout)
            outputs.append(o)
        if whole > 0:
            middle = rows.between(lead, lead + whole)
            o, *entered = self._in_batches(middle, state.state, state.bias, None, leaving=True)
            state = self._opened(N, *entered)
            outputs.append(o)
        if lead + whole < T or not outputs:
            o, state = self._by_token(rows.between(lead + whole, T), state, layout)
            outputs.append(o)
        cache.update(zip(TTTState._fields, state, strict=True))
        return torch.cat(outputs, dim=1)

    def _opened(self, N: int, state: Tensor | None = None, bias: Tensor | None = None) -> TTTState:
        """State of N sequences at the start of a mini-batch; by default the learned initial state."""
        if state is None or bias is None:
            # At least float32, like the operators' states, so that a 16-bit layer does not round its updates.
            wide = torch.promote_types(self.start.dtype, torch.float32)
            state, bias = (s.to(wide).expand(N, *s.shape) for s in (self.start, self.start_bias))
        position = torch.zeros(N, dtype=torch.int32, device=state.device)
        return TTTState(state, bias, torch.zeros_like(state), torch.zeros_like(bias), position)

    def _until_closed(self, state: TTTState, T: int) -> int:
        """Number of tokens, at most T, to the end of the open mini-batch; T if that differs between rows."""
        if T < self.mini_batch:
            return T
        missing = (-state.position % self.mini_batch).unique()
        return int(missing[0]) if missing.shape[0] == 1 else T


class _TokenRows(NamedTuple):
    """Token inputs of the operators.

    Attributes:
        q, k: [B, T, H, D].
        v: [B, T, HV, D].
        eta, eta_col: [B, T, HV].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor
    eta_col: Tensor

    def between(self, start: int, stop: int) -> _TokenRows:
        return _TokenRows(*(x[:, start:stop] for x in self))
