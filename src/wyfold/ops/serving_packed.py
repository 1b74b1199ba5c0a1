"""`decode` from a layer's projections, in one launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wyfold.ops import serving_call
from wyfold.ops.delta_widths import WIDEST_VALUE
from wyfold.ops.serving_checks import ServingFlags, ServingTensors
from wyfold.runtime import check
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.replay_cache import PublicOperator, planned
from wyfold.runtime.torch_ops import in_autocast_dtype


def decode_packed(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    pool: Tensor,
    state_indices: Tensor | None = None,
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    state_v_first: bool,
    has_initial_state: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    scale: float | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    backend: str | None = None,
) -> Tensor:
    """`decode` from a layer's projections: concatenated q, k and v, with raw gate and write strength.

        q, k, v = mixed_qkv split by heads;   q <- q / |q|;   k <- k / |k|
        g = -exp(A_log) softplus(raw_g + dt_bias)           or lower_bound sigmoid(exp(A_log) (raw_g + dt_bias))
        beta = sigmoid(raw_beta)                            twice that with allow_neg_eigval
        S = pool[state_indices[n]]                          zeros where has_initial_state[n] is False
        S <- exp(g) S;   S <- S + beta k (v - S^T k)^T;   o = scale S^T q
        pool[state_indices[n]] = S                          or pool[output_state_indices[n]]

    On a GPU all of it is one launch. The norm is x (sum x^2 + 1e-6)^(-1/2).

    Args:
        mixed_qkv: [N, D], D = 2 H K + HV V: q, k and v of each row, after the short convolution, head by head.
        raw_g: [N, HV] (GDN), or [N, HV, K] or [N, HV * K] (KDA), any float. Pre-activation of the gate.
        raw_beta: [N, HV] any float. Logit of the write strength.
        A_log: HV elements, any float. Natural log of the rate. None: rate 1.
        dt_bias: [HV] (GDN), or [HV, K] or [HV * K] (KDA), any float. None: 0.
        pool, state_indices, state_v_first, has_initial_state, output_state_indices, pad_slot_id, scale, backend: As in
            `decode`.
        heads: (H, HV).
        dims: (K, V).
        safe_gate: Clamp log decays from below at `lower_bound`, which is then in [-5, 0) and defaults to -5.
        lower_bound: < 0. Bound of the bounded gate. None: the softplus gate.
        allow_neg_eigval: Use twice the sigmoid, in [0, 2].
        out: [N, HV, V] output buffer, returned: dtype of mixed_qkv, or float32 for 16-bit mixed_qkv.

    Returns:
        o: [N, HV, V]; `out` if given.

    Raises:
        TypeError: An argument has the wrong Python type; heads or dims is not a pair of ints.
        ValueError: A shape, dtype, device or combination is wrong, or an argument requires a gradient. Inside
            `checked` also: live slots are not distinct, or a row writes a slot that another row reads.
        UnsupportedError: No backend, or not the demanded one, serves the device and dtypes.

    Source:
        Gated DeltaNet, arXiv:2412.06464v3, Eq. (10) and section 3.4; Kimi Linear, arXiv:2510.26692, Eq. (1).

    Examples:
        >>> import torch
        >>> from wyfold import serving
        >>> pool = torch.zeros(8, 4, 16, 32)
        >>> mixed = torch.randn(3, 2 * 2 * 16 + 4 * 32)
        >>> serving.decode_packed(
        ...     mixed, torch.randn(3, 4), torch.randn(3, 4), torch.zeros(4), None, pool, torch.tensor([1, 4, 2]),
        ...     heads=(2, 4), dims=(16, 32), state_v_first=False,
        ... ).shape
        torch.Size([3, 4, 32])
    """
    sizes = *_pair("decode_packed", "heads", heads), *_pair("decode_packed", "dims", dims)
    flags = ServingFlags(
        op="decode_packed",
        channel=False,  # until raw_g is looked at
        state_v_first=state_v_first,
        pad_slot_id=pad_slot_id,
        scale=scale,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=allow_neg_eigval,
        use_gate_in_kernel=True,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        backend=backend,
    )
    tensors = (
        mixed_qkv, raw_g, raw_beta, A_log, dt_bias, pool, state_indices, output_state_indices, has_initial_state, out,
    )  # fmt: skip
    return planned(_DECODE_PACKED, tensors, (*sizes, *flags))


def _plan_packed(tensors: tuple[Any, ...], values: tuple[Any, ...]) -> DeltaOptions:
    """Check the call and return its options."""
    _check_projections(tensors, values)
    try:
        return serving_call.make_plan(*_unpacked(tensors, values))
    except ValueError:
        # The shared checks name q, k, v, g and beta; raise in the names of this operator's arguments instead.
        _check_packed(tensors, values)
        raise


def _run_packed(options: DeltaOptions, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Tensor:
    o, out = serving_call.run(options, *_unpacked(tensors, values)), tensors[-1]
    found: Tensor = o[:, 0] if out is None else out
    return found


_DECODE_PACKED = PublicOperator(_plan_packed, _run_packed)


def _check_projections(tensors: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    """Check what `_unpacked` reads."""
    (mixed_qkv, raw_g, raw_beta, *_, out), (H, HV, K, V) = tensors, values[:4]
    op, width = "decode_packed", 2 * H * K + HV * V
    if check.tensor(op, "mixed_qkv", mixed_qkv).ndim != 2 or mixed_qkv.shape[1] != width:
        raise ValueError(f"{op}: mixed_qkv must be [N, 2 H K + HV V] = [N, {width}], got {list(mixed_qkv.shape)}")
    N = mixed_qkv.shape[0]
    shape = list(check.tensor(op, "raw_g", raw_g).shape)
    if shape not in ([N, HV], [N, HV, K], [N, HV * K]):
        wanted = f"[{N}, {HV}], [{N}, {HV}, {K}] or [{N}, {HV * K}]"
        raise ValueError(f"{op}: raw_g must be [N, HV], [N, HV, K] or [N, HV * K] = {wanted}, got {shape}")
    check.shapes(op, known={"N": N, "HV": HV}, raw_beta=(raw_beta, "N HV"))
    if out is not None:
        check.shapes(op, known={"N": N, "HV": HV, "V": V}, out=(out, "N HV V"))


def _unpacked(tensors: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[ServingTensors, ServingFlags]:
    """The arguments of `decode`: q, k and v as views; the gate kind follows from the shape of raw_g."""
    mixed_qkv, raw_g, raw_beta, A_log, dt_bias, pool, source, target, given, out = tensors
    H, HV, K, V = values[:4]
    q, k, v = mixed_qkv.split([H * K, H * K, HV * V], 1)
    if raw_g.shape[1:] == (HV * K,) and raw_g.shape[1:] != (HV,):
        raw_g = raw_g.unflatten(1, (HV, K))
    flags = ServingFlags(*values[4:])._replace(channel=raw_g.ndim == 3)
    unpacked = ServingTensors(
        q.unflatten(1, (H, K))[:, None], k.unflatten(1, (H, K))[:, None], v.unflatten(1, (HV, V))[:, None],
        raw_g[:, None], raw_beta[:, None], A_log, dt_bias, None, pool, source, target, given,
        None, None, None, None if out is None else out[:, None],
    )  # fmt: skip
    return unpacked, flags


def _check_packed(tensors: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    """Repeat the shared checks whose messages would name arguments that `decode_packed` does not have."""
    (mixed_qkv, raw_g, raw_beta, A_log, dt_bias, pool, *_, out), (H, HV, K, V) = tensors, values[:4]
    op = "decode_packed"
    check.head_groups(op, H, HV, keys="q and k in heads", values="heads")
    check.width(op, "K", "dims", K)
    check.width(op, "V", "dims", V, most=WIDEST_VALUE)
    given = {"mixed_qkv": mixed_qkv, "raw_g": raw_g, "raw_beta": raw_beta}
    check.floating(op, mixed_qkv=mixed_qkv, raw_g=raw_g, raw_beta=raw_beta)
    check.same_attribute(op, "device", **given, A_log=A_log, dt_bias=dt_bias, pool=pool, out=out)
    check.output_dtype(op, out, mixed_qkv=in_autocast_dtype(mixed_qkv)[0])
    check.no_gradients(op, given)


def _pair(op: str, name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{op}: {name} must be two ints, got {value!r}")
    return check.integer(op, name, value[0], least=1), check.integer(op, name, value[1], least=1)
