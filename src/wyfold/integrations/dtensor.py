"""Tensor parallelism for a `Decoder` by DTensor: heads and inner channels are sharded over the ranks of a mesh.

    mesh = init_device_mesh("cuda", (tp,), mesh_dim_names=("tp",))
    wyfold.integrations.dtensor.parallelize(model, mesh)

Recurrences of different heads are independent, so a rank with some of the heads runs them as a layer with fewer heads.
The input of a mixer or MLP is replicated; its output is the sum of the ranks' partial outputs. This takes one
all-reduce after it in the forward, and one before it in the backward.

| parameters | placement |
|---|---|
| projections to q, k, v, beta, decay and gate; filters; decay parameters; the MLP's input matrix | `Shard(0)` |
| output matrix of a mixer and of the MLP | `Shard(1)` |
| parameters shared by a layer's heads: a head's norm, the down-projection of a low-rank gate | `Replicate()` |
| embedding, norms of the residual stream, output matrix | ordinary tensors, equal on all ranks |

Matrices that stack several projections (queries, keys and values) are stored in another row order, which keeps each
rank's queries, keys and values together. `whole` restores the decoder's order and names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wyfold.layers.attention import SoftmaxAttention
from wyfold.layers.delta_net import DeltaMixer
from wyfold.models import Decoder, DecoderConfig, SwiGLU

STACKED = ("qkv.weight", "conv.weight", "up.weight")
"""Parameters whose rows are several stacked projections."""


class Parted(nn.Module):
    """Module sharded over a mesh: each rank holds and computes one part.

    Args:
        whole: The full module, with parameters equal on all ranks.
        part: The module with one rank's heads or channels; its parameters' values are not read.
        mesh: `DeviceMesh` with one axis.
        stacks: Number of rows of each projection in a stacked matrix of the whole.
    """

    def __init__(self, whole: nn.Module, part: nn.Module, mesh: Any, stacks: Sequence[int]):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        super().__init__()
        self.part, self.mesh, self.stacks = part, mesh, tuple(stacks)
        for name, own in list(part.named_parameters()):
            source = whole.get_parameter(name)
            cut = [d for d, (size, all_of_it) in enumerate(zip(own.shape, source.shape)) if size != all_of_it]
            placement = Shard(cut[0]) if cut else Replicate()
            rows = source.detach()
            if name in STACKED:
                rows = rows[self._order(rows.device)]
            parameter = nn.Parameter(distribute_tensor(rows, mesh, [placement]), requires_grad=source.requires_grad)
            owner, _, leaf = name.rpartition(".")
            setattr(part.get_submodule(owner), leaf, parameter)

    def forward(self, x: Tensor, **where: Any) -> Tensor:
        """Compute the full module's output, on every rank."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        everywhere, summed = [Replicate()], [Partial()]
        own: dict[str, Tensor] = {}
        held: Any
        for name, held in self.part.named_parameters():
            # Each rank's heads contribute to the gradient of a shared parameter; the backward sums them.
            shared = held.placements[0].is_replicate()
            given = held.redistribute(placements=everywhere) if shared and torch.is_grad_enabled() else held
            own[name] = given.to_local(grad_placements=summed if shared else None)
        mine = DTensor.from_local(x, self.mesh, everywhere, run_check=False).to_local(grad_placements=summed)
        y = torch.func.functional_call(self.part, own, (mine,), where)
        return DTensor.from_local(y, self.mesh, summed, run_check=False).redistribute(placements=everywhere).to_local()

    def __getattr__(self, name: str) -> Any:
        if name in ("new_pool", "has_pool"):  # for this rank's heads; absent if the part has none
            return getattr(self.part, name)
        return super().__getattr__(name)

    def gathered(self) -> dict[str, Tensor]:
        """Gather the full module's parameters in their original order. A collective: all ranks must call it."""
        found = {}
        for name, parameter in self.part.named_parameters():
            kept: Any = parameter.detach()
            rows: Tensor = kept.full_tensor()
            if name in STACKED:
                rows = torch.empty_like(rows).index_copy_(0, self._order(rows.device), rows)
            found[name] = rows
        return found

    def _order(self, device: torch.device) -> Tensor:
        """For each stored row of a stacked matrix, its row in the original order."""
        ranks = self.mesh.size()
        stacks = torch.arange(sum(self.stacks), device=device).split(self.stacks)
        return torch.cat([stack.chunk(ranks)[rank] for rank in range(ranks) for stack in stacks])


def parallelize(model: Decoder, mesh: Any) -> None:
    """Shard the mixers and MLPs of a decoder, in place. If parameters differ between ranks, those of rank 0 are used.

    Args:
        model: Decoder with layers of the delta family and softmax attention only.
        mesh: `DeviceMesh` with one axis, on the model's devices.

    Raises:
        ValueError: A number of heads or channels is not a multiple of the number of ranks, a layer mixes its heads, or
            the decoder is already sharded.
    """
    ranks, config = mesh.size(), model.config
    blocks: list[Any] = list(model.blocks)
    if mesh.ndim != 1:
        raise ValueError(f"parallelize: mesh must have one axis, got {mesh.ndim}")
    if any(isinstance(part, Parted) for part in model.modules()):
        raise ValueError("parallelize: model must be whole, got one that an earlier call has divided already")
    for name, block in zip(config.layers, blocks, strict=True):
        if not isinstance(block.mixer, DeltaMixer | SoftmaxAttention):
            raise ValueError(f"parallelize: layers must be of the delta family or attention, got {name}")
        if getattr(block.mixer, "updates", 1) > 1:  # whose rows of k, v and beta are stacks of heads
            raise ValueError(
                f"parallelize: layers must have one update of a token, got {block.mixer.updates} in {name}"
            )
        for what, count in _counts(block).items():
            if count % ranks:
                raise ValueError(f"parallelize: {what} must be a multiple of the {ranks} ranks, got {count} in {name}")
    for name, block in zip(config.layers, blocks, strict=True):
        mixer, mlp = block.mixer, block.mlp
        inner = mlp.out.in_features
        with torch.device("meta"):
            fewer, thinner = _narrowed(config, name, mixer, ranks), SwiGLU(config.hidden_size, inner // ranks)
        block.mixer = Parted(mixer, fewer, mesh, _stacks(mixer))
        block.mlp = Parted(mlp, thinner, mesh, (inner, inner))


def whole(model: Decoder) -> dict[str, Tensor]:
    """Gather the full state dict of a sharded decoder. A collective: all ranks must call it.

    Args:
        model: Decoder after `parallelize`.

    Returns:
        Name -> tensor, with the names and row order of an ordinary decoder.
    """
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, Parted):
            found |= {f"{path}.{name}": x for name, x in module.gathered().items()}
    ordinary = {name: x for name, x in model.state_dict().items() if ".part." not in name}
    return ordinary | found


def _counts(block: Any) -> dict[str, int]:
    mixer = block.mixer
    kv = mixer.num_kv_heads if isinstance(mixer, SoftmaxAttention) else mixer.num_v_heads
    return {"num_heads": mixer.num_heads, "value heads": kv, "mlp_size": block.mlp.out.in_features}


def _narrowed(config: DecoderConfig, name: str, mixer: Any, ranks: int) -> nn.Module:
    """A mixer like the given one, with one rank's share of the heads."""
    options = dict(config.options.get(name, {}))
    heads = {"num_heads": mixer.num_heads // ranks}
    if isinstance(mixer, SoftmaxAttention):
        heads["num_kv_heads"] = mixer.num_kv_heads // ranks
    else:
        heads["num_v_heads"] = mixer.num_v_heads // ranks
    fewer = dataclasses.replace(config, options={name: options | heads}, num_layers=1, pattern=name)
    return fewer.mixer(name, backend=getattr(mixer, "backend", None))


def _stacks(mixer: Any) -> tuple[int, int, int]:
    if isinstance(mixer, SoftmaxAttention):
        q, kv = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        return q, kv, kv
    return mixer.key_size, mixer.key_size, mixer.value_size
