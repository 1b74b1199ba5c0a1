"""DeltaNet layer, and the base class it shares with its gated successors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wyfold.context_parallel.context import ContextParallel
from wyfold.kernels import table
from wyfold.layers.cache import LayerCache
from wyfold.layers.conv import ShortConvolution
from wyfold.layers.layer_call import run_rule, sequences
from wyfold.layers.pools import LayerPool
from wyfold.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from wyfold.ops.delta_widths import WIDEST_KEY, WIDEST_VALUE
from wyfold.ops.serving_delta import decode, prefill
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout


class DeltaMixer(nn.Module):
    """Base class of the delta-rule layers.

        q, k, v = conv(qkv(x)),   b = beta(x)
        y = out(norm(rule(q / |q|, k / |k|, v, sigmoid(b), gate)))

    A subclass defines the rule, the gate and the norm: `operators`, `gate_arguments` and `read_out`.

    Args:
        hidden_size: Width of x.
        num_heads: H, query and key heads.
        num_v_heads: HV, value heads, a multiple of H. None: H.
        head_dim: K, width of a query and key.
        head_v_dim: V, width of a value. None: K.
        conv_size: Length of the short convolution.
        allow_neg_eigval: beta in [0, 2] instead of [0, 1], so that a step can flip the sign of a state's component
            (arXiv:2411.12537).
        backend: Backend of every operator in the layer. None: the best available one, which on CUDA is never "eager".
        updates: Keys, values and write strengths of a token.

    Raises:
        ValueError: A size is not supported by the operator.
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
        updates: int = 1,
    ):
        super().__init__()
        name = type(self).__name__
        self.hidden_size = check.integer(name, "hidden_size", hidden_size, least=1)
        self.num_heads, self.num_v_heads = grouped_heads(name, num_heads, num_v_heads)
        self.head_dim, self.head_v_dim = head_widths(name, head_dim, head_v_dim)
        check.flag(name, allow_neg_eigval=allow_neg_eigval)
        check.choice(name, "backend", backend, (None, *table.BACKENDS))
        self.allow_neg_eigval, self.backend, self.updates = allow_neg_eigval, backend, updates
        self.key_size = self.num_heads * self.head_dim
        self.value_size = self.num_v_heads * self.head_v_dim
        self.channels = [self.key_size, updates * self.key_size, updates * self.value_size]  # of q, k and v
        self.qkv = nn.Linear(hidden_size, sum(self.channels), bias=False)
        self.conv = ShortConvolution(sum(self.channels), conv_size, backend=backend)
        self.beta = nn.Linear(hidden_size, updates * self.num_v_heads, bias=False)
        self.out = nn.Linear(self.value_size, hidden_size, bias=False)

    def gate_arguments(self, x: Tensor) -> dict[str, Any]:
        """Keyword arguments of the operator that define the gate for x."""
        return {}

    def _as_one_function(self, x: Tensor, layout: SequenceLayout | None) -> Tensor | None:
        """The layer as one autograd function; None if its modules have to run. See `wyfold.ops.mixer`."""
        return None

    def _serve(self, rule: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        """Call `prefill` or `decode`; returns [B, T, HV, V]."""
        o: Tensor = rule(q, k, v, **arguments)
        return o

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        """Normalise (and gate) the rule's output.

        Args:
            o: [B, T, HV, V], output of the rule.
            x: [B, T, hidden_size], input of the layer.

        Returns:
            Normalised o: [B, T, HV, V].
        """
        raise NotImplementedError

    @property
    def has_pool(self) -> bool:
        """Whether `new_pool` can make a pool, whose states have widths that kernels have."""
        widest = (self.head_dim, WIDEST_KEY), (self.head_v_dim, WIDEST_VALUE)
        return all(width % 8 == 0 and width <= most for width, most in widest)

    def new_pool(
        self, slots: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LayerPool:
        """Allocate a zero-filled pool.

        Args:
            slots: Number of sequences the pool holds.
            device: None: that of the layer's parameters.
            dtype: Dtype of the convolution's inputs. None: that of the layer's parameters. States are float32, or
                float64 if dtype is.

        Raises:
            ValueError: No device is given, and the parameters are on the meta device, as those of an offloaded layer;
                or K or V is no multiple of 8, K is above 256 or V above 512.
        """
        name = f"{type(self).__name__}.new_pool"
        check.width(name, "K", "head_dim", self.head_dim)
        check.width(name, "V", "head_v_dim", self.head_v_dim, most=WIDEST_VALUE)
        check.integer(name, "slots", slots, least=1)
        weight = self.conv.weight  # only for device and dtype: a sharded or offloaded one has no values here
        if device is None and weight.device.type == "meta":
            raise ValueError(f"{name}: device must be given for a layer whose parameters are offloaded or meta")
        device, dtype = weight.device if device is None else device, weight.dtype if dtype is None else dtype
        wide = torch.promote_types(dtype, torch.float32)
        return LayerPool(
            torch.zeros(slots, sum(self.channels), self.conv.conv_size - 1, device=device, dtype=dtype),
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
        """Mix each sequence over time.

        Args:
            x: [B, T, hidden_size].
            layout: Boundaries of packed sequences, for which B is 1. No information crosses a boundary.
            cache: `LayerCache` with "conv" [N, D, W-1] and "state" [N, HV, K, V]; the call continues from these and
                replaces them. An empty cache starts new sequences. Or a `LayerPool`, which the call updates in place,
                without a gradient.
            cp_context: From `wyfold.cp.build_cp_context`, instead of layout and cache. x is this rank's shard of the
                tokens; sequences cross ranks. Each rank gets its partial gradient of every parameter.

        Returns:
            y: [B, T, hidden_size], dtype of x. Exact zeros past the last boundary.

        Raises:
            TypeError: x has another dtype than the parameters outside autocast, or cache has the wrong type.
            ValueError: x, layout and cache do not fit together.
        """
        if isinstance(cache, LayerPool):
            if cp_context is not None:
                pool: Any = cache  # refused like any cache, on all ranks
                sequences(type(self).__name__, x, self.hidden_size, self.qkv, layout, pool, {}, cp_context)
            return self._served(x, layout, cache)
        if cache is None and cp_context is None:
            y = self._as_one_function(x, layout)
            if y is not None:
                return y
        D, HV, K, V = sum(self.channels), self.num_v_heads, self.head_dim, self.head_v_dim
        holds = {"conv": f"N {D} S", "state": f"N {HV} {K} {V}"}
        sequences(type(self).__name__, x, self.hidden_size, self.qkv, layout, cache, holds, cp_context)
        qkv = self.conv(self.qkv(x), layout=layout, cache=cache, cp_context=cp_context)
        q, k, v = self._heads(qkv)
        options = {
            "beta": self._rows(self.beta(x), self.num_v_heads),
            **self.gate_arguments(x),
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
        }
        o = run_rule(
            self.operators,
            (q, k, v),
            layout=layout,
            cache=cache,
            cp_context=cp_context,
            backend=self.backend,
            options=options,
        )
        return self.out(self.read_out(o, x).flatten(2))

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, K], and k [B, T n, H, K] and v [B, T n, HV, V] of n updates, from [B, T, channels]."""
        q, k, v = qkv.split_with_sizes(self.channels, -1)
        keys = self._rows(k, self.num_heads, self.head_dim)
        values = self._rows(v, self.num_v_heads, self.head_v_dim)
        return q.unflatten(-1, (self.num_heads, self.head_dim)), keys, values

    def _rows(self, x: Tensor, *sizes: int) -> Tensor:
        """[B, T, n heads ..] -> [B, T n, heads, ..]: one row for each of a token's n updates."""
        if self.updates == 1:  # each view is another node for autograd
            return x.unflatten(-1, sizes) if len(sizes) > 1 else x
        return x.unflatten(-1, (self.updates, *sizes)).flatten(1, 2)

    def _served(self, x: Tensor, layout: SequenceLayout | None, pool: LayerPool) -> Tensor:
        """`forward` with states in pool slots."""
        sequences(type(self).__name__, x, self.hidden_size, self.qkv, layout, None, {})
        where: dict[str, Any] = {"state_indices": pool.slots, "has_initial_state": pool.given, "backend": self.backend}
        packed: dict[str, Any] = {} if layout is None and x.shape[1] == 1 else {"cu_seqlens": layout}
        rule = prefill if packed else decode
        qkv = self.conv(self.qkv(x), layout=layout, cache=pool)
        q, k, v = self._heads(qkv)
        o = self._serve(
            rule,
            q,
            k,
            v,
            beta=self._rows(self.beta(x), self.num_v_heads),
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
    """DeltaNet layer: each token corrects the state's value for its key; there is no other decay.

        q, k, v = silu(conv(W_qkv x)),   beta = sigmoid(W_beta x),   y = W_o rms_norm(delta_rule(q/|q|, k/|k|, v, beta))

    Args:
        hidden_size: Width of x.
        num_heads: H, query and key heads.
        num_v_heads: HV, value heads, a multiple of H. None: H.
        head_dim: K, width of a query and key, 1 to 256.
        head_v_dim: V, width of a value, 1 to 512. None: K.
        conv_size: Length of the short convolution, 2 to 8.
        allow_neg_eigval: beta in [0, 2] instead of [0, 1] (arXiv:2411.12537).
        norm_eps: eps of the output norm.
        backend: Backend of every operator in the layer. None: the best available one, which on CUDA is never "eager".

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A size is not supported by the operator.

    Examples:
        >>> import torch
        >>> from wyfold.layers import LayerCache
        >>> layer, cache = DeltaNet(hidden_size=32, num_heads=2, head_dim=16), LayerCache()
        >>> x = torch.randn(1, 5, 32)
        >>> whole, first, rest = layer(x), layer(x[:, :3], cache=cache), layer(x[:, 3:], cache=cache)
        >>> torch.testing.assert_close(torch.cat([first, rest], dim=1), whole)

    Source:
        DeltaNet, arXiv:2406.06484, section 2.2.
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
        self.norm = nn.RMSNorm(self.head_v_dim, eps=check.epsilon("DeltaNet", norm_eps, name="norm_eps"))

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        return self.norm(o)


def grouped_heads(name: str, num_heads: int, num_v_heads: int | None) -> tuple[int, int]:
    """Check that HV is a multiple of H; return H and HV."""
    check.integer(name, "num_heads", num_heads, least=1)
    num_v_heads = num_heads if num_v_heads is None else check.integer(name, "num_v_heads", num_v_heads, least=1)
    if num_v_heads % num_heads != 0:
        raise ValueError(f"{name}: num_v_heads must be a multiple of num_heads = {num_heads}, got {num_v_heads}")
    return num_heads, num_v_heads


def head_widths(name: str, head_dim: int, head_v_dim: int | None) -> tuple[int, int]:
    """Check the widths of a head; return K and V."""
    widths = head_dim, head_dim if head_v_dim is None else head_v_dim
    arguments = ("K", "head_dim", WIDEST_KEY), ("V", "head_v_dim", WIDEST_VALUE)
    for (letter, argument, most), width in zip(arguments, widths, strict=True):
        check.any_width(name, letter, argument, check.integer(name, argument, width, least=1), most=most)
    return widths
