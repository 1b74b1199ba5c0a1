"""Layers as cases of `bench`: a layer as a function of its input and its parameters, which are arguments of the case.

The width of a layer is H K. Its gate is that of a model: projections go to the operator, which activates them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wyfold import layers
from wyfold.cli.catalog import LAYERS
from wyfold.cli.operators import Arguments
from wyfold.reference.shapes import Shape

INPUT = "x"
"""Name of a layer's input among its arguments. The other tensors are its parameters, by their names in the layer."""
HEADS = "num_heads"
"""Name of H among the arguments: it does not follow from the tensors."""

EPS = 1e-6
"""eps of the output norm, for all libraries."""


@dataclass(frozen=True)
class LayerSpec:
    """A layer with the attributes of an `OperatorSpec` that cases use.

    Attributes:
        name: Name of the layer's class.
        shape: Sizes of the case.
    """

    name: str
    shape: Shape
    outputs: tuple[str, ...] = ("y",)
    backward: bool = True
    family: str = "random"

    @property
    def operator(self) -> str:
        """Full name below `wyfold`."""
        return f"layers.{self.name}"

    def ours(self, arguments: Arguments) -> tuple[Tensor, ...]:
        """Call the layer with these parameters, on the backend in `arguments`, if any."""
        given = dict(arguments)
        function = _ours(self.name, self.shape, given.pop("backend", None))
        return (function(given),)

    def truth(self, arguments: Arguments) -> tuple[Tensor, ...]:
        """Call the layer on the eager backend, in the dtype of the arguments."""
        return self.ours(arguments | {"backend": "eager"})


def layer_spec(op: str, shape: Shape) -> LayerSpec:
    """Specification of a layer case."""
    return LayerSpec(LAYERS[op], shape)


def layer_arguments(op: str, shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Arguments:
    """Parameters of an initialised layer, by name, and its `HEADS`. Those of the decay are float32 or wider.

    They are drawn on the CPU: a capture that failed, as that of fla's layers does, leaves PyTorch's generator of the
    GPU unusable.
    """
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        layer = _layer(LAYERS[op], shape, None, "cpu")
    wide = torch.promote_types(dtype, torch.float32)
    parameters = {
        name: x.detach().to(device, wide if name.startswith("decay_parameters.") else dtype)
        for name, x in layer.named_parameters()
    }
    return parameters | {HEADS: shape.H}


def fla_layer(name: str, made: Callable[..., nn.Module], arguments: Arguments) -> Callable[[Arguments], Tensor]:
    """fla's layer as a function of the arguments of a case.

    Args:
        name: Name of its class, which is that of Wyfold's.
        made: The class.
        arguments: Arguments of the case, for their sizes.
    """
    from wyfold.integrations.fla.mixer_weights import KINDS

    width, H = arguments[INPUT].shape[-1], arguments[HEADS]
    V, HV, K = arguments["norm.weight"].numel(), arguments["decay_parameters.A_log"].numel(), width // H
    sizes = {"hidden_size": width, "num_heads": H, "num_v_heads": HV, "head_dim": K, "expand_v": V / K}
    with torch.device("meta"):
        layer = made(**sizes, norm_eps=EPS)
    names, split = KINDS[name].names, [H * K, H * K, HV * V]

    def parameters(given: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {names[ours]: x for ours, x in given.items() if ours in names}
        found["dt_bias"] = found["dt_bias"].reshape(-1)
        for of, weight, taps in zip("qkv", given["qkv.weight"].split(split), given["conv.weight"].split(split)):
            found |= {f"{of}_proj.weight": weight, f"{of}_conv1d.weight": taps.unsqueeze(1)}
        return found

    call = _with_parameters(layer, parameters)
    return lambda arguments: call(arguments)[0]


@functools.cache
def _ours(name: str, shape: Shape, backend: str | None) -> Callable[[Arguments], Any]:
    return _with_parameters(_layer(name, shape, backend, "meta"), lambda given: given)


def _layer(name: str, shape: Shape, backend: str | None, device: str) -> nn.Module:
    with torch.device(device):
        sizes = (shape.H * shape.K, shape.H, shape.HV, shape.K, shape.V)
        made: nn.Module = getattr(layers, name)(*sizes, norm_eps=EPS, backend=backend)
    return made


def _with_parameters(
    layer: nn.Module, parameters: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> Callable[[Arguments], Any]:
    """The function that calls a layer on the input and the parameters among its arguments.

    `torch.func.functional_call` does the same and takes ten times as long on the host.

    Args:
        layer: The layer. Its own parameters are never read.
        parameters: Maps the arguments' parameters to those of the layer, by their names there.
    """
    owners = {
        name: (layer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
        for name, _ in layer.named_parameters()
    }

    def call(arguments: Arguments) -> Any:
        given = {name: x for name, x in arguments.items() if isinstance(x, Tensor) and name != INPUT}
        for name, x in parameters(given).items():
            owner, of = owners[name]
            x._is_param = True  # for modules that ask whether it is an nn.Parameter
            owner._parameters[of] = x  # type: ignore[assignment]
        return layer(arguments[INPUT])

    return call
