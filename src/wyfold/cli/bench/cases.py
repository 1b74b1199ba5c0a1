"""Cases of `bench`: operators, sizes, gates and directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import wyfold
from wyfold.cli.bench.layers import LayerSpec, layer_spec
from wyfold.cli.bench.tensors import GATES, MIXED_LENGTHS, SEQUENCES, SHORT_LENGTHS, UPDATES, CaseTensors
from wyfold.cli.catalog import BOUNDED, CHUNKED, DELTA_RULES, LAYERS, LINEAR, LOW_RANK, NO_GATE, OPS, RWKV7, TARGETED
from wyfold.cli.operators import GRADIENT_OF, OPERATOR_SPECS, Arguments, Named, OperatorSpec
from wyfold.reference.shapes import Shape

MOST_NUMBERS = 2**40
"""Largest number of elements of one tensor; no device holds as many."""

PINNED = {
    "h96": Shape(1, 8192, 96, 96, 128, 128),
    "b4t4k": Shape(4, 4096, 64, 64, 128, 128),
    "t64kh8": Shape(1, 65536, 8, 8, 128, 128),
    "b4t16kh4": Shape(4, 16384, 4, 4, 128, 128),
    "mixed": Shape(1, sum(MIXED_LENGTHS), 4, 4, 128, 128),
    "t32k": Shape(1, 32768, 32, 32, 128, 128),
    "qwen": Shape(1, 8192, 16, 32, 128, 128),
    "ttt": Shape(4, 4096, 32, 32, 64, 64),
    "short": Shape(1, sum(SHORT_LENGTHS), 32, 32, 128, 128),
    "dense": Shape(SEQUENCES, 128, 32, 32, 128, 128),
    "token64": Shape(64, 1, 32, 32, 128, 128),
    "token1024": Shape(1024, 1, 32, 32, 128, 128),
}
"""Shapes by name.

- `mixed` is packed: one long sequence and many of 1k to 2k tokens.
- `short` is packed: many sequences of 1 to 200 tokens. `dense` is its counterpart without packing.
- `token64` and `token1024` are one token of many sequences, for decoding.
"""


@dataclass(frozen=True)
class Case:
    """One operator on one set of tensors.

    Attributes:
        op: Name on the command line, a key of `catalog.OPS`, or a key of `catalog.LAYERS`.
        shape: Sizes B, T, H, HV, K, V.
        gate: One of `GATES`, "model", "bounded", "rwkv7" or "none".
        dtype: Dtype of q, k, v and other large tensors. Beta and decays are float32 or wider.
        mode: "fwd", or "fwdbwd" with the gradients of every floating argument.
        seed: Seed of the tensors.
        name: Name of the shape; empty if it has none.
        norm: Where the rows of q and k are normalised: "inside" the operator, or "outside", when they are drawn.
        chunk: Rows of a chunk, for solve and kkt.
        gate_dtype: Dtype of the decays.
        device: Device of all tensors.
        backend: Backend requested from Wyfold; empty for the dispatch table's choice.
    """

    op: str
    shape: Shape
    gate: str
    dtype: str
    mode: str
    seed: int
    name: str = ""
    norm: str = "inside"
    chunk: int = 64
    gate_dtype: str = "float32"
    device: str = "cpu"
    backend: str = ""

    @property
    def backward(self) -> bool:
        return self.mode == "fwdbwd"

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def spec(self) -> OperatorSpec | LayerSpec:
        return layer_spec(self.op, self.shape) if self.layer else OPERATOR_SPECS[OPS[self.op]]

    @property
    def layer(self) -> bool:
        """Whether the case is a layer. The others are operators."""
        return self.op in LAYERS

    @property
    def targeted(self) -> bool:
        """Whether the operator's accuracy has absolute targets."""
        return self.kind in TARGETED

    @property
    def updates(self) -> int:
        """Rows of k, v and beta for each token."""
        return UPDATES if self.kind == "gdp" else 1

    @property
    def kind(self) -> str:
        """Name without the prefix of its form (`recurrent_`, `decode_`)."""
        return self.op.removeprefix("recurrent_").removeprefix("decode_")

    @property
    def decoding(self) -> bool:
        """Whether the operator runs from an initial state to a final state."""
        return self.op.startswith("decode_")

    @property
    def family(self) -> str:
        """Input family, which selects the absolute targets. Slow decays accumulate as much rounding as "uniform+"."""
        if self.kind in LOW_RANK:
            return "low rank"
        if self.kind == "path":
            return "path"
        return "uniform+" if self.kind in LINEAR and self.gate in (NO_GATE, "slow") else self.spec.family

    @property
    def token_heads(self) -> int:
        """Number of (token, value head) pairs, the unit of work."""
        return self.shape.B * self.shape.T * self.shape.HV

    @property
    def title(self) -> str:
        size = self.name or ",".join(str(n) for n in vars(self.shape).values())
        rows = f" C{self.chunk}" if self.op in CHUNKED else ""
        return f"{self.op}{rows} {size} {self.mode}, {self.gate} gate, {self.dtype}"

    def refusal(self) -> str:
        """Why the operator refuses tensors of this shape; empty if it accepts them. Allocates no tensor."""
        s = self.shape
        if self.layer:
            return ""  # its constructor refuses sizes
        if self.decoding and s.T != 1:
            return f"decodes one token of each sequence, so T must be 1, got {s.T}; more sequences are a larger B"
        if self.kind == "ttt" and s.K != s.V:
            return f"its states are square, so V must be K = {s.K}, got {s.V}"
        if s.B * s.T * max(s.H, s.HV) * max(s.K, s.V) > MOST_NUMBERS:
            return f"its tensors must have at most {MOST_NUMBERS:,} numbers each, got {s}"
        operator = wyfold.serving.decode if self.decoding else getattr(wyfold, OPS[self.op])
        with FakeTensorMode():
            try:
                fake = replace(self, device="cpu").arguments()
                wyfold.explain(operator, **(self.decode_arguments(fake) if self.decoding else fake), backend="eager")
            except ValueError as error:
                return str(error)
        return ""

    def arguments(self) -> Arguments:
        """Draw the operator's keyword arguments. They depend on the case and the type of device only."""
        tensors = CaseTensors(self)
        if self.layer:
            return tensors.layer()
        draw: Callable[[], Arguments] = getattr(tensors, "rule" if self.kind in DELTA_RULES else self.kind)
        return draw()

    def decode_arguments(self, arguments: Arguments) -> Arguments:
        """Arguments for `serving.decode`: the initial states become its pool, which it updates in place."""
        rest = {name: x for name, x in arguments.items() if name not in ("initial_state", "output_final_state", "gk")}
        rule = "delta" if self.kind in DELTA_RULES else self.kind
        given = {"g": arguments.get("gk"), "beta": None, "pool": arguments["initial_state"], "state_v_first": False}
        return given | {"rule": rule} | rest

    def incoming(self, arguments: Arguments) -> Tensor:
        """Draw a gradient for the output, which has the shape of v, or of the first argument if there is no v."""
        like = self._output_like(arguments)
        dtype = torch.promote_types(like.dtype, torch.float32) if self.op.endswith("_gate") else like.dtype
        size = [*like.shape]
        if self.op == "path":  # a row for each query head
            size[2] = arguments["q"].shape[2]
        return CaseTensors(replace(self, seed=self.seed + (1 << 20))).normal(*size).to(dtype)

    def floor_bytes(self, arguments: Arguments) -> int:
        """Least bytes an implementation must move: every input read once, every output written once.

        With a backward: inputs are read twice, the output is written and its gradient read, and one gradient is written
        per floating input. For recurrences but TTT a 16-bit state per 64 tokens is written and read as well.
        """
        tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
        read, written = sum(map(_bytes, tensors)), self._written(arguments)
        if not self.backward:
            return read + written
        gradients = sum(_bytes(x) for x in tensors if x.is_floating_point())
        states = 0
        if self.kind in LINEAR:
            states = self.token_heads * self.shape.K * self.shape.V * 2 // 64
        return 2 * read + 2 * written + gradients + 2 * states

    def _written(self, arguments: Arguments) -> int:
        """Bytes of the output."""
        like = self._output_like(arguments)
        if self.op == "kkt":
            return int(arguments["beta"].numel()) * self.chunk * 4
        if self.op == "path":
            return self.token_heads * self.shape.V * int(like.element_size())
        states = _bytes(arguments["initial_state"]) if self.decoding else 0
        return int(like.numel()) * (4 if self.op.endswith("_gate") else like.element_size()) + states

    def _output_like(self, arguments: Arguments) -> Tensor:
        """A tensor of the output's shape and dtype: v in the rows of tokens, or the first argument if there is no v."""
        like: Tensor = arguments.get("v", next(iter(arguments.values())))
        return like[:, :: self.updates]


def gates_of(op: str, gates: Sequence[str]) -> Sequence[str]:
    """Select the gates that apply to an operator."""
    if op in ("kkt", "path"):
        return (NO_GATE, *(gate for gate in gates if gate in GATES))
    if op.endswith("rwkv7"):
        return (RWKV7,)
    if op.endswith(("gdp", "gla", "dplr", "gdn2", "comba")):  # timed with decays that are given
        return [gate for gate in gates if gate in GATES]
    if op.endswith("gdn"):
        return [gate for gate in gates if gate not in (BOUNDED, NO_GATE)]
    return [gate for gate in gates if gate != NO_GATE] if op.endswith("kda") else (NO_GATE,)


def leaves(arguments: Arguments) -> Named:
    """Every floating argument, by name, as a leaf tensor that requires a gradient. Memory is shared."""
    return {
        name: value.detach().requires_grad_()
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def gradient_name(argument: str) -> str:
    return GRADIENT_OF.get(argument, f"d{argument}")


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
