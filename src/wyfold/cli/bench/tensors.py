"""Tensors of a case of `bench`, drawn on its device: one method for each operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import wyfold
from wyfold.cli.bench.layers import INPUT, layer_arguments
from wyfold.cli.catalog import BOUNDED, MODEL, NO_GATE, RWKV7
from wyfold.cli.operators import Arguments
from wyfold.reference import inputs

if TYPE_CHECKING:
    from wyfold.cli.bench.cases import Case

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "fast": lambda x: -5 * torch.special.ndtr(x),  # uniform, mean -2.5 per token
    "mid": lambda x: F.logsigmoid(x).clamp(min=-5),
    "slow": lambda x: -2e-3 * torch.special.ndtr(x),  # uniform, mean -0.001
}
"""Gate -> function from standard normal numbers to natural-log decays per token."""


def _rwkv7_decays(x: Tensor) -> Tensor:
    """Log decays of RWKV-7's layer, between -0.607 and 0."""
    return -math.exp(-0.5) * x.sigmoid()


LOWER_BOUND = -5.0
"""Bound of the gate "bounded"."""

UPDATES = 2
"""Updates of a token of DeltaProduct."""
SEQUENCES, LONGEST = 256, 200
_DRAWN_LENGTHS = torch.randint(1, LONGEST + 1, (SEQUENCES,), generator=torch.Generator().manual_seed(0))
SHORT_LENGTHS: tuple[int, ...] = tuple(_DRAWN_LENGTHS.tolist())
"""Tokens of each sequence of the packed shape `short`."""
_BESIDE_LONG = torch.randint(1024, 2049, (32,), generator=torch.Generator().manual_seed(0))
MIXED_LENGTHS: tuple[int, ...] = (65536, *_BESIDE_LONG.tolist())
"""Tokens of each sequence of the packed shape `mixed`: one that a GPU splits into segments, and 32 that it does not."""


def packed_lengths(name: str) -> tuple[int, ...]:
    """Tokens of each sequence of a packed shape; empty for other shapes."""
    return {"short": SHORT_LENGTHS, "mixed": MIXED_LENGTHS}.get(name, ())


class CaseTensors:
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
        of = _rwkv7_decays if self.case.gate == RWKV7 else GATES[self.case.gate]
        return of(self.per_token(*size)).to(dtype)

    def key_and_value(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of q and k of length 1, and v."""
        s = self.shape
        q, k = (self.unit(self.per_token(s.H, s.K)).to(self.dtype) for _ in range(2))
        return q, k, self.per_token(s.HV, s.V).to(self.dtype)

    def rule(self) -> Arguments:
        s, case = self.shape, self.case
        drawn: Arguments = dict(zip("qkv", self.key_and_value(), strict=True))
        channels = (s.HV, s.K) if case.op.endswith("kda") else (s.HV,)
        if case.gate in (MODEL, BOUNDED):
            drawn |= self.model_gate(*channels)
        else:
            drawn |= {} if case.gate == NO_GATE else {"g": self.decay(*channels)}
            drawn["beta"] = self.per_token(s.HV).sigmoid_()
        return drawn | self.normalisation() | self.states() | self.packing()

    def normalisation(self) -> Arguments:
        """The flag of an operator that normalises its keys, if the case wants that."""
        return {"use_qk_l2norm_in_kernel": True} if self.case.norm == "inside" else {}

    def states(self) -> Arguments:
        """Initial states, for decoding."""
        if not self.case.decoding:
            return {}
        s = self.shape
        state = self.normal(s.B, s.HV, s.K, s.V)
        return {"initial_state": state.div_(s.K**0.5), "output_final_state": True}

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
        q, k, v = self.key_and_value()
        drawn: Arguments = {"q": q, "k": k, "v": v, "g": self.decay(self.shape.HV, self.shape.K)}
        return drawn | self.states() | self.packing()

    def iplr(self) -> Arguments:
        """Rows a of length 1, and columns b along them, shorter and of the other sign, as RWKV-7 has them."""
        s = self.shape
        q, k, v = self.key_and_value()
        kk, rate = self.unit(self.per_token(s.H, s.K)), self.per_token(s.H, s.K).sigmoid_()
        drawn: Arguments = {"q": q, "k": k, "v": v, "a": (-kk).to(self.dtype), "b": (rate * kk).to(self.dtype)}
        return drawn | self.packing()

    def dplr(self) -> Arguments:
        return self.iplr() | {"gk": self.decay(self.shape.HV, self.shape.K)} | self.states()

    def rwkv7(self) -> Arguments:
        drawn = self.dplr()
        return {{"q": "r", "gk": "w"}.get(name, name): x for name, x in drawn.items()}

    def gdn2(self) -> Arguments:
        """Erase gates per key channel and write gates per value channel, both in [0, 1]."""
        s = self.shape
        q, k, v = self.key_and_value()
        drawn: Arguments = {"q": q, "k": k, "v": v, "g": self.decay(s.HV, s.K)}
        for name, width in (("b", s.K), ("w", s.V)):
            drawn[name] = self.per_token(s.HV, width).sigmoid_().to(self.dtype)
        return drawn | self.normalisation() | self.states() | self.packing()

    def comba(self) -> Arguments:
        """Rows p along k, shorter, as Comba's layer has them."""
        q, k, v = self.key_and_value()
        drawn: Arguments = {"q": q, "k": k, "v": v, "p": 0.8 * k, "g": self.decay(self.shape.HV)}
        return drawn | {"beta": self.per_token(self.shape.HV).sigmoid_()} | self.normalisation() | self.packing()

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
