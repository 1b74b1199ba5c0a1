"""Serving pools of layers.

A `LayerPool` holds many sequences of a delta-family layer, one per slot; a call updates its slots in place, without a
gradient. `DecodingPools` holds one pool per layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wyfold.layers.cache import each_layer
from wyfold.runtime import check


class LayerPool:
    """State of one layer for many sequences, updated in place, and the slots of the current call.

    Attributes:
        conv: [slots, D, W-1] latest inputs of the short convolution.
        state: [slots, HV, V, K] states, V-first.
        slots: [N] int32 or int64 slot of each sequence of the call. None: sequence n uses slot n.
        given: [N] bool, has_initial_state. False: the sequence starts from zeros and ignores its slot. None: all True.
    """

    def __init__(self, conv: Tensor, state: Tensor, slots: Tensor | None = None, given: Tensor | None = None):
        for name, x in (("conv", conv), ("state", state), ("slots", slots), ("given", given)):
            if not isinstance(x, Tensor) and (x is not None or name in ("conv", "state")):
                raise TypeError(f"LayerPool: {name} must be a torch.Tensor, got {type(x).__name__}")
        self.conv, self.state, self.slots, self.given = conv, state, slots, given

    def at(self, slots: Tensor | None, has_initial_state: Tensor | None = None) -> LayerPool:
        """The same pool, for a call with these slots."""
        return LayerPool(self.conv, self.state, slots, has_initial_state)

    @property
    def nbytes(self) -> int:
        """Size of the pool in bytes."""
        return self.conv.nbytes + self.state.nbytes


class PooledCache:
    """Pools of all layers of a model for one call with N = batch_size sequences; made by `DecodingPools.at`.

    Attributes:
        layers: One `LayerPool` per layer.
        batch_size: N.
    """

    def __init__(self, layers: Sequence[LayerPool], batch_size: int):
        self.layers = each_layer("PooledCache", layers, LayerPool)
        self.batch_size = check.integer("PooledCache", "batch_size", batch_size, least=0)


class DecodingPools:
    """Pools of all layers of a model, initially zero. Calls update them in place and allocate no other state.

    Args:
        layers: One `LayerPool` per layer, all with the same number of slots.

    Examples:
        >>> import torch
        >>> from wyfold.models import Decoder, DecoderConfig
        >>> model = Decoder(DecoderConfig(hidden_size=32, num_layers=2, pattern="gdn", num_heads=2, head_dim=16))
        >>> pools = model.new_pools(8)
        >>> with torch.no_grad():
        ...     _ = model(torch.randint(256, (2, 9)), cache=pools.at(torch.tensor([5, 0])))
        >>> [bool(state.any()) for state in pools.layers[0].state]
        [True, False, False, False, False, True, False, False]
    """

    def __init__(self, layers: Sequence[LayerPool]):
        self.layers = each_layer("DecodingPools", layers, LayerPool)
        if not self.layers:
            raise ValueError("DecodingPools: layers must be one LayerPool or more, got none")

    def at(self, slots: Tensor | None = None, has_initial_state: Tensor | None = None) -> PooledCache:
        """The `cache=` argument of a call.

        Args:
            slots: [N] int32 or int64, distinct. A row whose index is not a slot is skipped; its output is undefined.
                None: every slot, in order.
            has_initial_state: [N] bool. False: the sequence starts from zeros and ignores its slot. None: all True.

        Raises:
            TypeError: An argument is no tensor.
            ValueError: An argument has a wrong shape or dtype.
        """
        op, N = "DecodingPools.at", self.layers[0].state.shape[0]
        if slots is not None:
            N = check.tensor(op, "slots", slots).numel()
        check.rows(op, "slots", slots, [N], form="[N]")
        check.rows(op, "has_initial_state", has_initial_state, [N], dtypes=(torch.bool,), form="[N]")
        return PooledCache([pool.at(slots, has_initial_state) for pool in self.layers], N)

    @property
    def nbytes(self) -> int:
        """Total size of the pools in bytes."""
        return sum(pool.nbytes for pool in self.layers)
