"""TTT-Linear: the state is a linear model, trained on the sequence while it is read."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from wyfold.layers.cache import LayerCache, sequences
from wyfold.layers.conv import ShortConvolution
from wyfold.layers.delta_net import grouped_heads
from wyfold.layers.norm import GatedRMSNorm
from wyfold.ops.ttt_linear import TTTState, chunk_ttt_linear, fused_recurrent_ttt_linear
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout
from wyfold.stages import table


class TTTLinear(nn.Module):
    """The layer of TTT-Linear: each mini-batch of tokens takes one step of gradient descent on the state.

        q, k, v = silu(conv(W_qkv x)),   eta = base_step sigmoid(W_step x + b_step) / D
        y = W_o (rms_norm(ttt_linear(q, k, v, w, b, eta)) * silu(W_gate x))

    The state starts from a learned one. Order reaches the layer through the short convolution, as in the paper's Mamba
    backbone; the step is a number per row, without the column factor of the published weights.

    Args:
        hidden_size: Width of x.
        num_heads: H, query and key heads.
        num_v_heads: HV, value heads, each with a state; a multiple of H; None = H.
        head_dim: D, width of queries, keys and values, at most 128.
        head_v_dim: D or None: the inner model maps keys to values of their width.
        conv_size: Length of the short convolution.
        mini_batch: Tokens that share the state their gradients are taken at: 16, 32 or 64, part of the model.
        base_step: Largest step times D.
        norm_eps: eps of the output norm and of the inner one.
        backend: Of every operator in the layer. None for the table's choice; on CUDA "eager" has to be asked for.

    Source:
        arXiv:2407.04620.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None = None,
        head_dim: int = 128,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        *,
        mini_batch: int = 16,
        base_step: float = 1.0,
        norm_eps: float = 1e-6,
        backend: str | None = None,
    ):
        super().__init__()
        name = "TTTLinear"
        self.hidden_size = check.integer(name, "hidden_size", hidden_size, least=1)
        self.num_heads, self.num_v_heads = grouped_heads(name, num_heads, num_v_heads)
        check.width(name, "K", "head_dim", check.integer(name, "head_dim", head_dim, least=1), most=128)
        if head_v_dim not in (None, head_dim):
            raise ValueError(f"{name}: head_v_dim must be None or head_dim = {head_dim}, got {head_v_dim}")
        check.choice(name, "mini_batch", mini_batch, (16, 32, 64))
        check.choice(name, "backend", backend, (None, *table.BACKENDS))
        self.head_dim, self.mini_batch, self.backend = head_dim, mini_batch, backend
        self.step_scale = check.number(name, "base_step", base_step) / head_dim
        self.eps = check.number(name, "norm_eps", norm_eps)
        self.key_size, self.value_size = num_heads * head_dim, self.num_v_heads * head_dim
        self.qkv = nn.Linear(hidden_size, 2 * self.key_size + self.value_size, bias=False)
        self.conv = ShortConvolution(2 * self.key_size + self.value_size, conv_size, backend=backend)
        self.step = nn.Linear(hidden_size, self.num_v_heads)
        self.w = nn.Parameter(torch.empty(self.num_v_heads, head_dim))
        self.b = nn.Parameter(torch.empty(self.num_v_heads, head_dim))
        self.start = nn.Parameter(torch.empty(self.num_v_heads, head_dim, head_dim))
        self.start_bias = nn.Parameter(torch.empty(self.num_v_heads, 1, head_dim))
        self.gate = nn.Linear(hidden_size, self.value_size, bias=False)
        self.norm = GatedRMSNorm(head_dim, eps=norm_eps, backend=backend)
        self.out = nn.Linear(self.value_size, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Inner norm the identity, the state's start small, its bias zero, the step half of its largest."""
        nn.init.ones_(self.w)
        nn.init.zeros_(self.b)
        nn.init.normal_(self.start, std=0.02)
        nn.init.zeros_(self.start_bias)
        nn.init.zeros_(self.step.bias)

    def forward(self, x: Tensor, *, layout: SequenceLayout | None = None, cache: LayerCache | None = None) -> Tensor:
        """Mixed sequences.

        Args:
            x: [B, T, hidden_size].
            layout: Boundaries of packed sequences, for which B is 1; nothing crosses one.
            cache: Holds "conv" [N, D, W-1] and the fields of a `TTTState`, from which x goes on, inside a mini-batch
                too; replaced. An empty dict starts. No gradient reaches what was read before an open mini-batch.

        Returns:
            y: [B, T, hidden_size], dtype of x. Exact zeros past the last boundary.

        Raises:
            ValueError: x, layout and cache do not fit together.
        """
        N = sequences("TTTLinear", x, self.hidden_size, layout, cache, ("conv", *TTTState._fields))
        qkv = self.conv(self.qkv(x), layout=layout, cache=cache)
        q, k, v = qkv.split([self.key_size, self.key_size, self.value_size], dim=-1)
        rows = _Rows(
            q.unflatten(-1, (self.num_heads, self.head_dim)),
            k.unflatten(-1, (self.num_heads, self.head_dim)),
            v.unflatten(-1, (self.num_v_heads, self.head_dim)),
            torch.sigmoid(self.step(x)) * self.step_scale,
        )
        if cache is None:
            start, start_bias = (s.expand(N, *s.shape) for s in (self.start, self.start_bias))
            o, _, _ = self._in_batches(rows, start, start_bias, layout, leaving=False)
        else:
            o = self._resume(rows, N, layout, cache)
        return self.out(self.norm(o, self.gate(x).view_as(o)).flatten(2))

    def _in_batches(
        self, rows: _Rows, state: Tensor, bias: Tensor, layout: SequenceLayout | None, *, leaving: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """All rows in mini-batches, the last of them maybe short: what was read, and on request the state."""
        return chunk_ttt_linear(
            rows.q,
            rows.k,
            rows.v,
            self.w,
            self.b,
            rows.eta,
            eps=self.eps,
            chunk_size=self.mini_batch,
            initial_state=state,
            initial_state_bias=bias,
            output_final_state=leaving,
            cu_seqlens=layout,
            backend=self.backend,
        )

    def _by_token(self, rows: _Rows, state: TTTState, layout: SequenceLayout | None) -> tuple[Tensor, TTTState]:
        """All rows one after another, the mini-batch they end in left open."""
        result = fused_recurrent_ttt_linear(
            rows.q,
            rows.k,
            rows.v,
            self.w,
            self.b,
            rows.eta,
            eps=self.eps,
            chunk_size=self.mini_batch,
            state=state,
            output_final_state=True,
            cu_seqlens=layout,
            backend=self.backend,
        )
        return cast(tuple[Tensor, TTTState], result)

    def _resume(self, rows: _Rows, N: int, layout: SequenceLayout | None, cache: LayerCache) -> Tensor:
        """What was read from the cache on: to the end of the open mini-batch, whole ones, the next open one."""
        T = rows.q.shape[1]
        begun = "state" in cache
        state = TTTState(*(cache[name] for name in TTTState._fields)) if begun else self._opened(N)
        if layout is not None:
            lead = T  # the chunk form would close what each packed sequence leaves open
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
        """The state of N sequences at the start of a mini-batch; by default, of their first."""
        if state is None or bias is None:
            # As wide as an operator's own states, so that a 16-bit layer does not round what it learns.
            wide = torch.promote_types(self.start.dtype, torch.float32)
            state, bias = (s.to(wide).expand(N, *s.shape) for s in (self.start, self.start_bias))
        position = torch.zeros(N, dtype=torch.int32, device=state.device)
        return TTTState(state, bias, torch.zeros_like(state), torch.zeros_like(bias), position)

    def _until_closed(self, state: TTTState, T: int) -> int:
        """Tokens, at most T, that go one by one: those the open mini-batch lacks, or all where rows differ in that."""
        if T < self.mini_batch:
            return T
        missing = (-state.position % self.mini_batch).unique()
        return int(missing[0]) if missing.shape[0] == 1 else T


class _Rows(NamedTuple):
    """Tokens as the operators take them: q, k [B, T, H, D], v [B, T, HV, D], eta [B, T, HV]."""

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor

    def between(self, start: int, stop: int) -> _Rows:
        return _Rows(*(x[:, start:stop] for x in self))
