"""Absolute targets: bounds on the relative RMS error of each tensor, by dtype and family of inputs.

Rule 4 of `error.py`. The 16-bit figures are 1.2 to 1.4 times the error of emulated or measured arithmetic;
docs/numerics.md distinguishes the two. They apply at K = V = 128 and below, and at T = 2,048 forward, 1,024 backward.
"""

import torch

STATES = ("state", "state_bias")
OUTPUTS = ("o", *STATES)
GRADIENTS = (
    "dq", "dr", "dk", "dv", "da", "dp", "dbeta", "dg", "dgk", "dh0", "dA_log", "ddt_bias", "deta", "deta_col", "dw",
    "db", "dc0",
)  # fmt: skip

# Float64 and float32: one bound per tensor...
WIDE = {
    torch.float64: dict.fromkeys(OUTPUTS, 1e-12) | dict.fromkeys(GRADIENTS, 1e-10),
    torch.float32: dict.fromkeys(OUTPUTS, 1e-5) | dict.fromkeys(GRADIENTS, 1e-4),
}
# ...except for three kinds of input on which float32 cannot meet it.
FLOAT32_EXCEPTIONS = {
    "identical": {"dg": 3e-4},
    "gate alternating": {"o": 6e-5, "state": 6e-5, "dg": 1.2e-4},
    # Without a gate. The Gram matrix's rounding accumulates: these bounds are proportional to the number of tokens.
    "repeated keys, beta 2": {"o": 1e-3, "state": 1.5e-3, "dh0": 1.5e-3}
    | dict.fromkeys(("dq", "dk", "dv", "dbeta", "dg"), 7e-4),
}

# Input family (or the gate that overrides it) -> tensor -> bound.
SIXTEEN_BIT = {
    "random": {
        "o": 4.5e-3, "state": 4e-3, "dq": 4.5e-3, "dk": 6e-3, "dv": 5e-3, "dbeta": 6.5e-3, "dg": 4.5e-3,
        "dh0": 4.5e-3, "dA_log": 1.2e-2, "ddt_bias": 5.5e-3,
    },
    "uniform+": {
        "o": 5e-3, "state": 5e-3, "dq": 6e-3, "dk": 6e-3, "dv": 5e-3, "dbeta": 7.5e-3, "dg": 9.5e-3,
        "dh0": 4.5e-3, "dA_log": 1.6e-2, "ddt_bias": 1.6e-2,
    },
    "identical": {
        "o": 5e-3, "state": 6e-2, "dq": 3.5e-2, "dk": 6.5e-3, "dv": 8e-3, "dbeta": 1e-2, "dg": 0.25,
        "dh0": 2.5e-3, "dA_log": 1.2e-2, "ddt_bias": 1.4e-2,
    },
    "beta 2": {
        "o": 1.7e-2, "state": 2e-2, "dq": 1.5e-2, "dk": 1.5e-2, "dv": 1.5e-2, "dbeta": 1.5e-2, "dg": 2e-2,
        "dh0": 2e-2, "dA_log": 3.5e-2, "ddt_bias": 1.5e-2,
    },
    "converged": {
        "o": 3.6e-3, "state": 2.2e-3, "dq": 3.6e-3, "dk": 7.5e-3, "dv": 1.2e-2, "dbeta": 8e-3, "dg": 4.2e-2,
        "dh0": 2.3e-3,
    },
    "gate -20": {
        "o": 4e-3, "state": 3e-3, "dq": 4e-3, "dk": 4e-3, "dv": 3.5e-3, "dbeta": 3.5e-3, "dg": 3e-3,
        "dh0": 3.5e-3,
    },
    # DPLR, IPLR, RWKV-7, GDN-2 and Comba: the largest error of any of them, with weak gates and with none.
    "low rank": {
        "o": 4e-3, "state": 3e-3, "dq": 3.6e-3, "dr": 3.6e-3, "dk": 4e-3, "dv": 4e-3, "da": 5.5e-3, "dp": 5.5e-3,
        "db": 5.5e-3, "dw": 4e-3, "dg": 4e-3, "dgk": 3.5e-3, "dbeta": 3.5e-3, "dh0": 3e-3,
    },
    # PaTH attention on an H200, T = 8,192, the larger of the errors without a gate and with one.
    "path": {
        "o": 3.2e-3, "dq": 4.8e-3, "dk": 5e-3, "dv": 3.5e-3, "dw": 7e-3, "dbeta": 6.7e-3, "dg": 2.3e-3,
    },
    "ttt": {
        "o": 2.5e-3, "state": 3e-3, "state_bias": 1e-3, "dq": 4e-3, "dk": 4e-3, "dv": 2.5e-3, "deta": 3.5e-3,
        "dw": 3e-3, "db": 3e-3, "dh0": 2e-3, "dc0": 6e-4,
    },
}  # fmt: skip


def target(name: str, dtype: torch.dtype, family: str = "random") -> float | None:
    """Absolute bound on the relative RMS error of one tensor.

    Args:
        name: One of `OUTPUTS` or `GRADIENTS`.
        dtype: Dtype of the operator's inputs.
        family: One of `inputs.FAMILIES`; or "gate " and one of `inputs.GATES`, if the gate dominates the error; or
            "repeated keys, beta 2"; or "low rank", "path" or "ttt".

    Returns:
        The bound. None for 16-bit inputs without one, which are judged by the yardstick alone.

    Raises:
        KeyError: The name of the tensor or the dtype is unknown.
    """
    if name not in OUTPUTS and name not in GRADIENTS:
        raise KeyError(f"target: name must be one of {OUTPUTS + GRADIENTS}, got {name!r}")
    if dtype in (torch.float16, torch.bfloat16):
        return SIXTEEN_BIT.get(family, {}).get(name)
    exceptions = FLOAT32_EXCEPTIONS.get(family, {}) if dtype == torch.float32 else {}
    return exceptions.get(name, WIDE[dtype][name])
