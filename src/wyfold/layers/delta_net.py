"""DeltaNet, and the frame it shares with its gated successors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wyfold.context_parallel.context import ContextParallel
from wyfold.kernels import table
from wyfold.layers.cache import LayerCache, LayerPool, sequences
from wyfold.layers.conv import ShortConvolution
from wyfold.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from wyfold.ops.serving_delta import decode, prefill
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout

# A chunk is padded to its full size, 16 tokens or more, so for this few going one by one is less work.
RECURRENT_TOKENS = 8


class DeltaMixer(nn.Module):
    """From hidden states to queries, keys and values, through a delta rule, and back.

        q, k, v = conv(qkv(x)),   b = beta(x)
        y = out(norm(rule(q / |q|, k / |k|, v, sigmoid(b), gate)))

    A layer of the family says which rule, which gate and which norm: `operators`, `gate_arguments` and `read_out`.

    Args:
        hidden_size: Width of x.
        num_heads: H, query and key heads.
        num_v_heads: HV, value heads, a multiple of H; None = H.
        head_dim: K, width of a query and key.
        head_v_dim: V, width of a value; None = K.
        conv_size: Length of the short convolution.
        allow_neg_eigval: beta in [0, 2] in place of [0, 1], so that a state can be turned over, not only shrunk
            (arXiv:2411.12537).
        backend: Of every operator in the layer. None for the table's choice; on CUDA "eager" has to be asked for.

    Raises:
        ValueError: a size that the operator does not offer.
    """

    operators: tuple[Any, Any]  # chunk form, recurrent form

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None,
        head_dim: int,
        head_v_dim: int | None,
        conv_size: int,
        allow_neg_eigval: bool,
        backend: str | None,
    ):
        super().__init__()
        name = type(self).__name__
        self.hidden_size = check.integer(name, "hidden_size", hidden_size, least=1)
        self.num_heads, self.num_v_heads = grouped_heads(name, num_heads, num_v_heads)
        self.head_dim = head_dim
        self.head_v_dim = head_dim if head_v_dim is None else head_v_dim
        check.width(name, "K", "head_dim", check.integer(name, "head_dim", head_dim, least=1))
        check.width(name, "V", "head_v_dim", check.integer(name, "head_v_dim", self.head_v_dim, least=1))
        check.flag(name, allow_neg_eigval=allow_neg_eigval)
        check.choice(name, "backend", backend, (None, *table.BACKENDS))
        self.allow_neg_eigval, self.backend = allow_neg_eigval, backend
        self.key_size = self.num_heads * self.head_dim
        self.value_size = self.num_v_heads * self.head_v_dim
        self.qkv = nn.Linear(hidden_size, 2 * self.key_size + self.value_size, bias=False)
        self.conv = ShortConvolution(2 * self.key_size + self.value_size, conv_size, backend=backend)
        self.beta = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.out = nn.Linear(self.value_size, hidden_size, bias=False)

    def gate_arguments(self, x: Tensor) -> dict[str, Any]:
        """The rule's gate, as keyword arguments of its operator."""
        return {}

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        """What the rule read, normed; [B, T, HV, V] both."""
        raise NotImplementedError

    def new_pool(
        self, slots: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LayerPool:
        """Zeros for so many sequences.

        Args:
            slots: Sequences the pool has room for.
            device: None: that of the layer's parameters.
            dtype: Of the convolution's inputs; None: that of the layer's parameters. States are float32, or float64
                with it.

        Raises:
            ValueError: the parameters are on the meta device, as those of an offloaded layer, and no device is given.
        """
        name = type(self).__name__
        check.integer(name, "slots", slots, least=1)
        weight = self.conv.weight  # its device and dtype alone: sharded and offloaded ones hold no numbers here
        if device is None and weight.device.type == "meta":
            raise ValueError(
                f"{name}.new_pool: device must be given for a layer whose parameters are offloaded or meta"
            )
        device, dtype = weight.device if device is None else device, weight.dtype if dtype is None else dtype
        wide = torch.promote_types(dtype, torch.float32)
        channels, kept = 2 * self.key_size + self.value_size, self.conv.conv_size - 1
        return LayerPool(
            torch.zeros(slots, channels, kept, device=device, dtype=dtype),
            torch.zeros(slots, self.num_v_heads, self.head_v_dim, self.head_dim, device=device, dtype=wide),
        )

    def forward(
        self,
        x: Tensor,
        *,
        layout: SequenceLayout | None = None,
        cache: LayerCache | LayerPool | None = None,
        cp_context: ContextParallel | None = None,
    ) -> Tensor:
        """Mixed sequences.

        Args:
            x: [B, T, hidden_size].
            layout: Boundaries of packed sequences, for which B is 1; nothing crosses one.
            cache: Holds "conv" [N, D, W-1] and "state" [N, HV, K, V], from which x goes on; replaced. An empty
                cache starts. Or a `LayerPool`, updated in place, without a gradient.
            cp_context: From `wyfold.cp.build_cp_context`, in the place of layout and cache: x is this rank's share of
                the tokens, and sequences go on over the ranks. Of each parameter a rank gets its share of the gradient.

        Returns:
            y: [B, T, hidden_size], dtype of x. Exact zeros past the last boundary.

        Raises:
            TypeError: x has another dtype than the parameters, and no autocast is open; cache is none of these.
            ValueError: x, layout and cache do not fit together.
        """
        if isinstance(cache, LayerPool):
            if cp_context is not None:
                pool: Any = cache  # refused as any cache is, on all ranks
                sequences(type(self).__name__, x, self.hidden_size, self.qkv, layout, pool, (), cp_context)
            return self._served(x, layout, cache)
        sequences(type(self).__name__, x, self.hidden_size, self.qkv, layout, cache, ("conv", "state"), cp_context)
        qkv = self.conv(self.qkv(x), layout=layout, cache=cache, cp_context=cp_context)
        q, k, v = qkv.split([self.key_size, self.key_size, self.value_size], dim=-1)
        state = None if cache is None else cache.get("state")
        chunk, recurrent = self.operators
        rule = chunk if cache is None or x.shape[1] > RECURRENT_TOKENS else recurrent
        across = {} if cp_context is None else {"cp_context": cp_context}  # which the recurrent forms do not take
        o, state = rule(
            q.unflatten(-1, (self.num_heads, self.head_dim)),
            k.unflatten(-1, (self.num_heads, self.head_dim)),
            v.unflatten(-1, (self.num_v_heads, self.head_v_dim)),
            beta=self.beta(x),
            **self.gate_arguments(x),
            initial_state=state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            state_dtype=None if state is None else state.dtype,
            cu_seqlens=layout,
            backend=self.backend,
            **across,
        )
        if cache is not None:
            cache["state"] = state
        return self.out(self.read_out(o, x).flatten(2))

    def _served(self, x: Tensor, layout: SequenceLayout | None, pool: LayerPool) -> Tensor:
        """`forward` from the slots of a pool and into them."""
        sequences(type(self).__name__, x, self.hidden_size, self.qkv, layout, None, ())
        where: dict[str, Any] = {"state_indices": pool.slots, "has_initial_state": pool.given, "backend": self.backend}
        packed: dict[str, Any] = {} if layout is None and x.shape[1] == 1 else {"cu_seqlens": layout}
        rule = prefill if packed else decode
        qkv = self.conv(self.qkv(x), layout=layout, cache=pool)
        q, k, v = qkv.split([self.key_size, self.key_size, self.value_size], dim=-1)
        o = rule(
            q.unflatten(-1, (self.num_heads, self.head_dim)),
            k.unflatten(-1, (self.num_heads, self.head_dim)),
            v.unflatten(-1, (self.num_v_heads, self.head_v_dim)),
            beta=self.beta(x),
            **{"g": None} | self.gate_arguments(x),
            pool=pool.state,
            state_v_first=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            **where,
            **packed,
        )
        return self.out(self.read_out(o, x).flatten(2))


class DeltaNet(DeltaMixer):
    """The layer of DeltaNet: each token corrects what the state returns for its key; nothing else is forgotten.

        q, k, v = silu(conv(W_qkv x)),   beta = sigmoid(W_beta x),   y = W_o rms_norm(delta_rule(q/|q|, k/|k|, v, beta))

    Args:
        hidden_size, num_heads, num_v_heads, head_dim, head_v_dim, conv_size, allow_neg_eigval: See `DeltaMixer`.
        norm_eps: eps of the output norm.
        backend: See `DeltaMixer`.

    Examples:
        >>> import torch
        >>> from wyfold.layers import LayerCache
        >>> layer, cache = DeltaNet(hidden_size=32, num_heads=2, head_dim=16), LayerCache()
        >>> x = torch.randn(1, 5, 32)
        >>> whole, first, rest = layer(x), layer(x[:, :3], cache=cache), layer(x[:, 3:], cache=cache)
        >>> torch.testing.assert_close(torch.cat([first, rest], dim=1), whole)

    Source:
        arXiv:2406.06484.
    """

    operators = (chunk_delta_rule, fused_recurrent_delta_rule)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None = None,
        head_dim: int = 128,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        *,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-6,
        backend: str | None = None,
    ):
        sizes = (hidden_size, num_heads, num_v_heads, head_dim, head_v_dim, conv_size)
        super().__init__(*sizes, allow_neg_eigval, backend)
        self.norm = nn.RMSNorm(self.head_v_dim, eps=check.number("DeltaNet", "norm_eps", norm_eps))

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        return self.norm(o)


def grouped_heads(name: str, num_heads: int, num_v_heads: int | None) -> tuple[int, int]:
    """H and HV, once HV is known to be a multiple of H."""
    check.integer(name, "num_heads", num_heads, least=1)
    num_v_heads = num_heads if num_v_heads is None else check.integer(name, "num_v_heads", num_v_heads, least=1)
    if num_v_heads % num_heads != 0:
        raise ValueError(f"{name}: num_v_heads must be a multiple of num_heads = {num_heads}, got {num_v_heads}")
    return num_heads, num_v_heads
