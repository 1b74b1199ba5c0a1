"""Cases of `bench`: operators, sizes, gates, and the tensors of a case, drawn on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import wyfold
from wyfold.cli.bench.layers import INPUT, LayerSpec, layer_arguments, layer_spec
from wyfold.cli.catalog import BOUNDED, CHUNKED, DELTA_RULES, LAYERS, MODEL, NO_GATE, OPS, RECURRENCES
from wyfold.cli.operators import GRADIENT_OF, OPERATOR_SPECS, Arguments, Named, OperatorSpec
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "fast": lambda x: -5 * torch.special.ndtr(x),  # uniform, mean -2.5 per token
    "mid": lambda x: F.logsigmoid(x).clamp(min=-5),
    "slow": lambda x: -2e-3 * torch.special.ndtr(x),  # uniform, mean -0.001
}
"""Gate -> function from standard normal numbers to natural-log decays per token."""

LOWER_BOUND = -5.0
"""Bound of the gate "bounded"."""

MOST_NUMBERS = 2**40
"""Largest number of elements of one tensor; no device holds as many."""
UPDATES = 2
"""Updates of a token of DeltaProduct."""
SEQUENCES, LONGEST = 256, 200
_DRAWN_LENGTHS = torch.randint(1, LONGEST + 1, (SEQUENCES,), generator=torch.Generator().manual_seed(0))
SHORT_LENGTHS: tuple[int, ...] = tuple(_DRAWN_LENGTHS.tolist())
"""Tokens of each sequence of the packed shape `short`."""
_BESIDE_LONG = torch.randint(1024, 2049, (32,), generator=torch.Generator().manual_seed(0))
MIXED_LENGTHS: tuple[int, ...] = (65536, *_BESIDE_LONG.tolist())
"""Tokens of each sequence of the packed shape `mixed`: one that a GPU splits into segments, and 32 that it does not."""

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
        gate: One of `GATES`, "model", "bounded" or "none".
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
    def recurrence(self) -> bool:
        """Whether the operator is a recurrence, whose accuracy has absolute targets."""
        return self.kind in RECURRENCES

    @property
    def updates(self) -> int:
        """Rows of k, v and beta for each token."""
        return UPDATES if self.op == "gdp" else 1

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
        rule = self.kind in (*DELTA_RULES, "gdp", "gla")
        return "uniform+" if rule and self.gate in (NO_GATE, "slow") else self.spec.family

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
                wyfold.explain(operator, **(decode_arguments(fake) if self.decoding else fake), backend="eager")
            except ValueError as error:
                return str(error)
        return ""

    def arguments(self) -> Arguments:
        """Draw the operator's keyword arguments. They depend on the case and the type of device only."""
        tensors = _Tensors(self)
        if self.layer:
            return tensors.layer()
        draw: Callable[[], Arguments] = getattr(tensors, "rule" if self.kind in DELTA_RULES else self.kind)
        return draw()

    def incoming(self, arguments: Arguments) -> Tensor:
        """Draw a gradient for the output, which has the shape of v, or of the first argument if there is no v."""
        like = self._output_like(arguments)
        dtype = torch.promote_types(like.dtype, torch.float32) if self.op.endswith("_gate") else like.dtype
        size = [*like.shape]
        if self.op == "path":  # a row for each query head
            size[2] = arguments["q"].shape[2]
        return _Tensors(replace(self, seed=self.seed + (1 << 20))).normal(*size).to(dtype)

    def floor_bytes(self, arguments: Arguments) -> int:
        """Least bytes an implementation must move: every input read once, every output written once.

        With a backward: inputs are read twice, the output is written and its gradient read, and one gradient is written
        per floating input. For the delta rules a 16-bit state per 64 tokens is written and read as well.
        """
        tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
        read, written = sum(map(_bytes, tensors)), self._written(arguments)
        if not self.backward:
            return read + written
        gradients = sum(_bytes(x) for x in tensors if x.is_floating_point())
        states = 0
        if self.kind in (*DELTA_RULES, "gdp", "gla"):
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
    if op.endswith(("gdp", "gla")):  # without an activation inside the operator
        return [gate for gate in gates if gate in GATES]
    if op.endswith("gdn"):
        return [gate for gate in gates if gate not in (BOUNDED, NO_GATE)]
    return [gate for gate in gates if gate != NO_GATE] if op.endswith("kda") else (NO_GATE,)


def decode_arguments(arguments: Arguments) -> Arguments:
    """Arguments for `serving.decode`: the initial states become its pool, which it updates in place."""
    rest = {name: x for name, x in arguments.items() if name not in ("initial_state", "output_final_state")}
    return {"g": None, "pool": arguments["initial_state"], "state_v_first": False} | rest


def packed_lengths(name: str) -> tuple[int, ...]:
    """Tokens of each sequence of a packed shape; empty for other shapes."""
    return {"short": SHORT_LENGTHS, "mixed": MIXED_LENGTHS}.get(name, ())


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


class _Tensors:
    """Draw the arguments of one case from one generator on its device; one method per operator."""

    def __init__(self, case: Case):
        self.case, self.shape, self.device = case, case.shape, case.device
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.generator = torch.Generator(case.device).manual_seed(case.seed)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, device=self.device, dtype=self.wide)

    def per_token(self, *size: int) -> Tensor:
        return self.normal(self.shape.B, self.shape.T, *size)

    def unit(self, x: Tensor) -> Tensor:
        return x.div_(torch.linalg.vector_norm(x, dim=-1, keepdim=True))

    def decay(self, *size: int) -> Tensor:
        """Natural-log decays of the case's gate, in `gate_dtype`, or in float64 if the case is in float64."""
        dtype = self.wide if self.wide == torch.float64 else getattr(torch, self.case.gate_dtype)
        return GATES[self.case.gate](self.per_token(*size)).to(dtype)

    def rule(self) -> Arguments:
        s, case = self.shape, self.case
        q, k = (self.unit(self.per_token(s.H, s.K)).to(self.dtype) for _ in range(2))
        drawn: Arguments = {"q": q, "k": k, "v": self.per_token(s.HV, s.V).to(self.dtype)}
        channels = (s.HV, s.K) if case.op.endswith("kda") else (s.HV,)
        if case.gate in (MODEL, BOUNDED):
            drawn |= self.model_gate(*channels)
        else:
            drawn |= {} if case.gate == NO_GATE else {"g": self.decay(*channels)}
            drawn["beta"] = self.per_token(s.HV).sigmoid_()
        if case.norm == "inside":
            drawn["use_qk_l2norm_in_kernel"] = True
        if case.decoding:
            state = self.normal(s.B, s.HV, s.K, s.V)
            drawn |= {"initial_state": state.div_(s.K**0.5), "output_final_state": True}
        return drawn | self.packing()

    def layer(self) -> Arguments:
        """The input of a layer, and its parameters."""
        s = self.shape
        drawn = layer_arguments(self.case.op, s, self.dtype, self.device, self.case.seed)
        return {INPUT: self.per_token(s.H * s.K).to(self.dtype)} | drawn

    def gdp(self) -> Arguments:
        """Two updates of a token, with keys normalised inside the operator, and beta in [0, 2]."""
        s, rows = self.shape, UPDATES * self.shape.T
        q, k, v = self.per_token(s.H, s.K), self.normal(s.B, rows, s.H, s.K), self.normal(s.B, rows, s.HV, s.V)
        drawn: Arguments = {"q": q.to(self.dtype), "k": k.to(self.dtype), "v": v.to(self.dtype), "g": self.decay(s.HV)}
        drawn |= {"beta": 2 * self.normal(s.B, rows, s.HV).sigmoid_(), "num_householder": UPDATES}
        return drawn | {"use_qk_l2norm_in_kernel": True} | self.packing()

    def gla(self) -> Arguments:
        s = self.shape
        q, k = (self.unit(self.per_token(s.H, s.K)).to(self.dtype) for _ in range(2))
        drawn = {"q": q, "k": k, "v": self.per_token(s.HV, s.V).to(self.dtype), "g": self.decay(s.HV, s.K)}
        return drawn | self.packing()

    def model_gate(self, *channels: int) -> Arguments:
        """Gate and beta as a layer projects them, with the layer's initial parameters."""
        rate, step = (torch.special.ndtr(self.normal(*size)) for size in (channels[:1], channels))
        A_log, dt_bias = inputs.decay_parameters(rate, step)
        bounded = {"A_log": torch.zeros_like(A_log), "lower_bound": LOWER_BOUND} if self.case.gate == BOUNDED else {}
        return {
            "g": self.per_token(*channels).to(self.dtype),
            "beta": self.per_token(channels[0]).to(self.dtype),
            "A_log": A_log,
            "dt_bias": dt_bias,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
        } | bounded

    def packing(self) -> Arguments:
        lengths = packed_lengths(self.case.name)
        return {"cu_seqlens": torch.tensor([0, *accumulate(lengths)], device=self.device)} if lengths else {}

    def ttt(self) -> Arguments:
        s = self.shape
        q, k = (self.unit(self.per_token(s.H, s.K)).to(self.dtype) for _ in range(2))
        w, b = 1 + 0.1 * self.normal(s.HV, s.K), 0.1 * self.normal(s.HV, s.K)
        eta = 0.1 * torch.special.ndtr(self.per_token(s.HV, 1))
        drawn = {"v": self.per_token(s.HV, s.K), "w": w, "b": b, "eta": eta}
        return {"q": q, "k": k} | {name: x.to(self.dtype) for name, x in drawn.items()} | self.packing()

    def path(self) -> Arguments:
        """HV query heads over H heads of keys. The norms of q and k are those of a model without rotary positions."""
        s = self.shape
        drawn = {"q": self.per_token(s.HV, s.K), "k": self.per_token(s.H, s.K), "v": self.per_token(s.H, s.V)}
        found = {name: x.to(self.dtype) for name, x in drawn.items()}
        found |= {"w": self.unit(self.per_token(s.H, s.K)), "beta": 2 * self.per_token(s.H).sigmoid_()}
        gate = {} if self.case.gate == NO_GATE else {"g": self.decay(s.HV)}
        return found | gate | self.packing()

    def solve(self) -> Arguments:
        """Triangular matrix of correlated keys: its powers grow quickly, but its inverse is small."""
        s, device = self.shape, self.device
        one = self.unit(self.normal(s.B, 1, s.H, s.K))
        k = self.unit(one + 1e-2 * s.K**-0.5 * self.per_token(s.H, s.K))
        beta, g = (torch.full((s.B, s.T, s.H), x, device=device, dtype=self.wide) for x in (0.835, -1e-3))
        A = wyfold.chunk_scaled_dot_kkt(k, beta, g, chunk_size=self.case.chunk, backend="eager")
        return {"A": A.to(self.dtype), "output_dtype": self.dtype}

    def kkt(self) -> Arguments:
        s = self.shape
        k = self.unit(self.per_token(s.H, s.K)).to(self.dtype)
        drawn: dict[str, Any] = {"k": k, "beta": self.per_token(s.HV).sigmoid_()}
        if self.case.gate != NO_GATE:
            drawn["g"] = self.decay(s.HV)
        return drawn | {"chunk_size": self.case.chunk} | self.packing()

    def conv(self) -> Arguments:
        D, W = self.shape.H * self.shape.K, 4
        drawn = {"x": self.per_token(D), "weight": self.normal(D, W), "bias": self.normal(D)}
        return {name: x.to(self.dtype) for name, x in drawn.items()} | {"activation": "silu"} | self.packing()

    def norm(self) -> Arguments:
        s = self.shape
        drawn = {"x": self.per_token(s.HV, s.V), "g": self.per_token(s.HV, s.V), "weight": self.normal(s.V)}
        return {name: x.to(self.dtype) for name, x in drawn.items()}

    def l2norm(self) -> Arguments:
        return {"x": self.per_token(self.shape.H, self.shape.K).to(self.dtype)}

    def gdn_gate(self) -> Arguments:
        HV = self.shape.HV
        return {"g": self.per_token(HV).to(self.dtype), "A_log": self.normal(HV), "dt_bias": self.normal(HV)}

    def kda_gate(self) -> Arguments:
        HV, K = self.shape.HV, self.shape.K
        return {"g": self.per_token(HV, K).to(self.dtype), "A_log": self.normal(HV), "dt_bias": self.normal(HV * K)}
