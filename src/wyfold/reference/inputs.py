"""Seeded operator arguments by name: typical ones, and ones that have broken kernels before.

`draw` makes the arguments of one call. A *family* names a combination of keys, gate, write strength and values; each of
the four may be replaced by name. All numbers are drawn in float64 on the CPU and rounded once, so one seed gives the
same inputs for every dtype, up to that rounding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wyfold.reference.shapes import DEFAULT, Shape

Draw = torch.Generator
Arguments = dict[str, Any]

# Rules, named after the token loops in this package.
RULES = ("delta_rule", "gated_delta_rule", "kda", "gla", "ttt_linear")
# Of these, the transition is diagonal plus low rank.
LOW_RANK = ("dplr_delta_rule", "iplr_delta_rule", "rwkv7", "mul_rwkv7", "gdn2", "comba")
CHUNK = 64  # grid of the "reset first" and "reset last" gates; 16 and 32 divide it


@dataclass(frozen=True)
class InputFamily:
    """Combination of keys, gate, write strength and values, by their names in the tables of this file.

    Attributes:
        keys: Name in `KEYS`.
        gate: Name in `GATES`.
        beta: Name in `BETAS`.
        values: Name in `VALUES`.
    """

    keys: str
    gate: str = "zero"
    beta: str = "one"
    values: str = "normal"


FAMILIES = {
    "random": InputFamily("normal", "weak", "sigmoid"),
    "uniform+": InputFamily("positive"),
    "identical": InputFamily("identical", "-1e-3", ".835"),
    "near-identical": InputFamily("near-identical", "-1e-3", ".835"),
    "two clusters": InputFamily("two clusters", "-1e-3", ".835"),
    "rank 4": InputFamily("rank 4", "weak", "sigmoid"),
    "vocabulary": InputFamily("vocabulary", "weak", "sigmoid"),
    "orthonormal": InputFamily("orthonormal", "weak", "sigmoid"),
    "one-hot": InputFamily("one-hot", "zero", "zero or one", "integer"),
    "zero keys": InputFamily("zero", "weak", "sigmoid"),
    "tiny keys": InputFamily("tiny", "weak", "sigmoid"),
    "huge keys": InputFamily("huge", "weak", "sigmoid"),
    "beta 2": InputFamily("normal", "zero", "two"),
    "converged": InputFamily("vocabulary", "zero", "one", "linear"),
}

# --- keys: [B, T, H, K], unit rows unless the name says otherwise ----------------------------------------------------


def _normal(shape: tuple[int, ...], draw: Draw) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def _uniform(shape: tuple[int, ...], draw: Draw) -> Tensor:
    return torch.rand(shape, generator=draw, dtype=torch.float64)


def _unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _from_few(shape: tuple[int, ...], draw: Draw, few: int) -> Tensor:
    """For each token, a random one of `few` unit keys of its head."""
    B, T, H, K = shape
    words = _unit(_normal((B, H, few, K), draw))
    which = torch.randint(0, few, (B, H, T, 1), generator=draw)
    return words.gather(2, which.expand(B, H, T, K)).transpose(1, 2)


def _near_identical(shape: tuple[int, ...], draw: Draw) -> Tensor:
    noise = _normal(shape, draw) / math.sqrt(shape[-1])  # unit rows on average
    return _unit(_from_few(shape, draw, 1) + 1e-2 * noise)


def _two_clusters(shape: tuple[int, ...], draw: Draw) -> Tensor:
    B, T, H, K = shape
    centres = _unit(_normal((B, 2, H, K), draw))
    alternating = centres[:, torch.arange(T) % 2]
    return _unit(alternating + 1e-2 * _normal(shape, draw) / math.sqrt(K))


def _rank_4(shape: tuple[int, ...], draw: Draw) -> Tensor:
    B, T, H, K = shape
    basis = _normal((B, 1, H, 4, K), draw)
    return _unit((_normal((B, T, H, 4, 1), draw) * basis).sum(3))


def _orthonormal(shape: tuple[int, ...], draw: Draw) -> Tensor:
    """K orthonormal keys of each head, repeated in turn."""
    B, T, H, K = shape
    basis = torch.linalg.qr(_normal((B, H, K, K), draw)).Q
    return basis[:, :, torch.arange(T) % K].transpose(1, 2)


def _one_hot(shape: tuple[int, ...], draw: Draw) -> Tensor:
    which = torch.randint(0, shape[-1], shape[:-1], generator=draw)
    return torch.nn.functional.one_hot(which, shape[-1]).double()


KEYS: dict[str, Callable[[tuple[int, ...], Draw], Tensor]] = {
    "normal": lambda shape, draw: _unit(_normal(shape, draw)),
    "positive": lambda shape, draw: _unit(_uniform(shape, draw)),  # cosine 0.75 between any two
    "identical": lambda shape, draw: _from_few(shape, draw, 1),
    "near-identical": _near_identical,
    "two clusters": _two_clusters,
    "rank 4": _rank_4,
    "vocabulary": lambda shape, draw: _from_few(shape, draw, 8),
    "orthonormal": _orthonormal,
    "one-hot": _one_hot,
    "zero": lambda shape, draw: torch.zeros(shape, dtype=torch.float64),
    "tiny": lambda shape, draw: 1e-4 * _unit(_normal(shape, draw)),
    "huge": lambda shape, draw: 1e4 * _unit(_normal(shape, draw)),  # for the operator's norm, or overflowing states
}

# --- gates: natural-log decay per token, [B, T, HV] or [B, T, HV, K] -------------------------------------------------


def _constant(value: float) -> Callable[[tuple[int, ...], Draw], Tensor]:
    return lambda shape, draw: torch.full(shape, value, dtype=torch.float64)


def _weak(shape: tuple[int, ...], draw: Draw) -> Tensor:
    return -0.1 * _uniform(shape, draw)


def _reset_where(chosen: Callable[[Tensor, int], Tensor]) -> Callable[[tuple[int, ...], Draw], Tensor]:
    """A weak gate that is -inf at the tokens selected by `chosen(position, T)`."""

    def gate(shape: tuple[int, ...], draw: Draw) -> Tensor:
        reset = chosen(torch.arange(shape[1]), shape[1])
        return _weak(shape, draw).where(~reset.view(1, -1, *[1] * (len(shape) - 2)), -math.inf)

    return gate


def _spiky(shape: tuple[int, ...], draw: Draw) -> Tensor:
    """Weak decays, with about one in thirty-two strong, -20 to -40."""
    return _weak(shape, draw) - 20 * (1 + _uniform(shape, draw)) * (_uniform(shape, draw) < 1 / 32)


def _dead_channel(shape: tuple[int, ...], draw: Draw) -> Tensor:
    """One channel (for a scalar gate: one head) with a reset at every token, the others weak."""
    return torch.cat([torch.full((*shape[:-1], 1), -1e6, dtype=torch.float64), _weak(shape, draw)[..., 1:]], dim=-1)


def _at_the_bound(shape: tuple[int, ...], draw: Draw) -> Tensor:
    """About a third exactly -5, the rest uniformly above."""
    return (-7.5 * _uniform(shape, draw)).clamp(min=-5.0)


GATES: dict[str, Callable[[tuple[int, ...], Draw], Tensor]] = {
    "zero": _constant(0.0),
    **{name: _constant(float(name)) for name in ("-1e-6", "-1e-3", "-1", "-5", "-20", "-88", "-1e3", "-1e6")},
    "weak": _weak,
    "any": lambda shape, draw: -torch.exp(4 * _normal(shape, draw) - 2),  # from -1e-6 to beyond -1e4
    "spiky": _spiky,
    "dead channel": _dead_channel,
    "bound reached": _at_the_bound,
    "reset all": _constant(-math.inf),
    "reset one": _reset_where(lambda position, T: position == T // 2),
    "reset first": _reset_where(lambda position, T: position % CHUNK == 0),
    "reset last": _reset_where(lambda position, T: (position % CHUNK == CHUNK - 1) | (position == T - 1)),
    "alternating": _reset_where(lambda position, T: position % 2 == 1),
}
# Pre-activations, with A_log and dt_bias as in a newly initialised model.
MODEL_GATES = ("model", "model bounded")

# --- write strengths: [B, T, HV] -------------------------------------------------------------------------------------


def _one_of(*values: float) -> Callable[[tuple[int, ...], Draw], Tensor]:
    table = torch.tensor(values, dtype=torch.float64)
    return lambda shape, draw: table[torch.randint(0, len(values), shape, generator=draw)]


BETAS: dict[str, Callable[[tuple[int, ...], Draw], Tensor]] = {
    "sigmoid": lambda shape, draw: torch.sigmoid(_normal(shape, draw)),
    "zero": _constant(0.0),
    "tiny": _constant(1e-8),
    "half": _constant(0.5),
    ".835": _constant(0.835),
    "one": _constant(1.0),
    "two": _constant(2.0),
    "zero or one": _one_of(0.0, 1.0),
    "mixed": _one_of(0.0, 1e-8, 0.5, 1.0, 2.0),
    "logits": _one_of(-50.0, -1.0, 0.0, 1.0, 50.0),  # sets use_beta_sigmoid_in_kernel
}

# --- values: [B, T, HV, V], as functions of the keys of each value head ----------------------------------------------


def _linear(keys: Tensor, V: int, draw: Draw) -> Tensor:
    B, _, HV, K = keys.shape
    return torch.einsum("bthk,bhkv->bthv", keys, _normal((B, HV, K, V), draw))


def _scaled(size: float) -> Callable[[Tensor, int, Draw], Tensor]:
    return lambda keys, V, draw: size * _normal((*keys.shape[:-1], V), draw)


VALUES: dict[str, Callable[[Tensor, int, Draw], Tensor]] = {
    "normal": _scaled(1.0),
    "linear": _linear,  # one matrix per head maps keys to values, so errors vanish
    "linear 4096": lambda keys, V, draw: 4096 * _unit(_linear(keys, V, draw)),
    "keys": lambda keys, V, draw: keys,  # TTT: the inner loss starts at its minimum; needs V = K
    "integer": lambda keys, V, draw: torch.randint(-8, 9, (*keys.shape[:-1], V), generator=draw).double(),
    "1e-4": _scaled(1e-4),
    "1e4": _scaled(1e4),
    "1e30": _scaled(1e30),  # beyond float16
    "6e4": lambda keys, V, draw: 6e4 * _uniform((*keys.shape[:-1], V), draw),  # just inside float16
}

# --- step sizes of TTT: [B, T, HV, 1] --------------------------------------------------------------------------------


def _one_huge(shape: tuple[int, ...], draw: Draw) -> Tensor:
    eta = 0.1 * _uniform(shape, draw)
    eta[:, shape[1] // 2] = 1e3
    return eta


def _last_zero(shape: tuple[int, ...], draw: Draw) -> Tensor:
    eta = 0.1 * _uniform(shape, draw)
    eta[:, -1] = 0.0
    return eta


ETAS: dict[str, Callable[[tuple[int, ...], Draw], Tensor]] = {
    "small": lambda shape, draw: 0.1 * _uniform(shape, draw),
    "zero": _constant(0.0),
    "one huge": _one_huge,
    "last zero": _last_zero,
}

ETA_COLS: dict[str, Callable[[tuple[int, ...], Draw], Tensor]] = {
    "uniform": lambda shape, draw: 2 * _uniform(shape, draw),
    "some zero": lambda shape, draw: 2 * _uniform(shape, draw) * (_uniform(shape, draw) < 0.75),
    "signed": _normal,  # occurs in no published layer
}  # factors of the tokens' own gradients, with the shape of eta

STATES: dict[str, float | None] = {
    "none": None,
    "zero": 0.0,
    "normal": 1.0,
    "6e4": 6e4,
}  # name -> size; None: no argument

# --- drawing ---------------------------------------------------------------------------------------------------------


def draw(
    family: str = "random",
    rule: str = "kda",
    shape: Shape = DEFAULT,
    *,
    keys: str | None = None,
    gate: str | None = None,
    beta: str | None = None,
    values: str | None = None,
    eta: str = "small",
    eta_col: str | None = None,
    state: str = "none",
    sequences: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Arguments:
    """Keyword arguments of one call, valid for a public operator and for its token loop.

    Args:
        family: One of `FAMILIES`; `keys`, `gate`, `beta` and `values` replace its parts.
        rule: One of `RULES` or `LOW_RANK`. Determines the set of arguments and the shape of g.
        shape: Sizes.
        keys: One of `KEYS`.
        gate: One of `GATES`, or "model" or, for KDA and GDN-2, "model bounded", which add A_log, dt_bias and their
            flags. Rules whose operator has no activation get "weak" instead of these.
        beta: One of `BETAS`. "logits" adds its flag.
        values: One of `VALUES`.
        eta: One of `ETAS`, for TTT-Linear.
        eta_col: One of `ETA_COLS`, for TTT-Linear. None: no argument.
        state: One of `STATES`, the size of the initial state. TTT-Linear also gets a bias state.
        sequences: N, rows of the initial state. None: B.
        dtype: Dtype of q, k, v, beta, eta, eta_col, w and b. Gates, their parameters and states are float32, or float64
            if dtype is.
        seed: Seed of the random numbers.

    Returns:
        Keyword arguments. Tensors are contiguous, on the CPU, and do not require gradients.

    Raises:
        KeyError: A name is in no table.
    """
    named = FAMILIES[family]
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    B, T, H, HV, K, V = shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V

    k = KEYS[keys or named.keys]((B, T, H, K), generator)
    q = _unit(_normal((B, T, H, K), generator))
    v = VALUES[values or named.values](k.repeat_interleave(HV // H, dim=2), V, generator)
    arguments: Arguments = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}

    if rule == "ttt_linear":
        arguments["w"] = (1 + 0.1 * _normal((HV, V), generator)).to(dtype)
        arguments["b"] = (0.1 * _normal((HV, V), generator)).to(dtype)
        arguments["eta"] = ETAS[eta]((B, T, HV, 1), generator).to(dtype)
    elif rule in LOW_RANK:
        pair = _low_rank(rule, k, shape, keys or named.keys, generator)
        arguments |= {name: x.to(dtype) for name, x in pair.items()}
    if rule in ("delta_rule", "gated_delta_rule", "kda", "comba"):
        write = beta or named.beta
        arguments["beta"] = BETAS[write]((B, T, HV), generator).to(dtype)
        if write == "logits":
            arguments["use_beta_sigmoid_in_kernel"] = True
    if rule not in ("delta_rule", "iplr_delta_rule", "ttt_linear"):
        channels = (HV,) if rule in ("gated_delta_rule", "comba") else (HV, K)
        name = gate or named.gate
        if name in MODEL_GATES and rule in LOW_RANK and rule != "gdn2":
            name = "weak"
        arguments |= _gate(name, (B, T), channels, generator, wide)

    size = STATES[state]
    if size is not None:
        N = B if sequences is None else sequences
        arguments["initial_state"] = (size * _normal((N, HV, K, V), generator)).to(wide)
        if rule == "ttt_linear":
            arguments["initial_state_bias"] = (size * _normal((N, HV, 1, V), generator)).to(wide)
    if eta_col is not None:  # drawn last, so that other arguments do not depend on it
        arguments["eta_col"] = ETA_COLS[eta_col]((B, T, HV, 1), generator).to(dtype)
    names = {"dplr_delta_rule": {"g": "gk"}, "rwkv7": RWKV7_NAMES, "mul_rwkv7": RWKV7_NAMES}.get(rule, {})
    return {names.get(name, name): value for name, value in arguments.items()}


def _low_rank(rule: str, k: Tensor, shape: Shape, keys: str, draw: Draw) -> Arguments:
    """The further tokens of a diagonal-plus-low-rank rule. No transition enlarges a state by much."""
    B, T, H, HV, K, V = shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V
    if rule == "comba":
        return {"p": 0.8 * k}
    if rule == "gdn2":
        return {"b": _uniform((B, T, HV, K), draw), "w": _uniform((B, T, HV, V), draw)}
    kk, rate = KEYS[keys]((B, T, H, K), draw), _uniform((B, T, H, K), draw)
    return {"kk": kk, "a": rate} if rule == "mul_rwkv7" else {"a": -kk, "b": rate * kk}


RWKV7_NAMES = {"q": "r", "g": "w"}


def incoming(result: Tensor, seed: int = 0, size: float = 1.0) -> Tensor:
    """Random gradient of `result`: normal times `size`, with its shape, dtype and device."""
    generator = torch.Generator().manual_seed(seed)
    return (size * _normal(tuple(result.shape), generator)).to(result)


def decay_parameters(rate: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """A_log and dt_bias of Mamba2's initialisation, from uniform numbers in [0, 1].

    Rates are uniform in [1, 16], steps log-uniform in [1e-3, 1e-1] through an inverse softplus.
    """
    dt = torch.exp(math.log(1e-3) + math.log(1e2) * step)
    return torch.log(1 + 15 * rate), dt + torch.log(-torch.expm1(-dt))


def _gate(name: str, lead: tuple[int, int], channels: tuple[int, ...], draw: Draw, dtype: torch.dtype) -> Arguments:
    """g, and for a model's gate the parameters and flags of its activation."""
    if name not in MODEL_GATES:
        return {"g": GATES[name]((*lead, *channels), draw).to(dtype)}
    step = _uniform(channels, draw)
    g = _normal((*lead, *channels), draw)
    A_log, dt_bias = decay_parameters(_uniform(channels[:1], draw), step)
    gate: Arguments = {
        "g": g.to(dtype),
        "A_log": A_log.to(dtype),
        "dt_bias": dt_bias.to(dtype),
        "use_gate_in_kernel": True,
    }
    if name == "model bounded":
        gate["lower_bound"] = -5.0
    return gate
