"""TTT-Linear for serving: sequence states live in pool slots, updated in place, without a gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wyfold.autograd.serving_ttt import serve_ttt_op
from wyfold.kernels import table
from wyfold.kernels.trial import Trial, sample
from wyfold.ops.serving_call import slot_samples, swap_batch_time
from wyfold.ops.ttt_call import LEAST_IN_TRIAL, check_form, check_tokens, column, split_numbers, wide_sample
from wyfold.ops.ttt_linear import TTTState
from wyfold.runtime import check
from wyfold.runtime.differentiation import refuse_transforms
from wyfold.runtime.replay_cache import PublicOperator, planned
from wyfold.runtime.torch_ops import call, in_autocast_dtype


def ttt_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    pool: TTTState,
    state_indices: Tensor | None = None,
    *,
    eta_col: Tensor | float | None = None,
    residual: str = "o",
    scale: float | None = None,
    eps: float = 1e-6,
    chunk_size: int = 16,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """One TTT-Linear token of each of N sequences; their states in the pool are updated in place.

        S, c, G, a, p = the pool's state, bias, grad, bias_grad and position at state_indices[n]
        z = S^T k + c
        n = gradient of 1/2 |w LN(z) + b - (v - k)|^2 in z, times eta_col
        G <- G + k n^T              a <- a + n              p <- p + 1
        h = scale (S - eta G)^T q + c - eta a               o = h + w LN(h) + b
        p = chunk_size:  S <- S - eta G;   c <- c - eta a;   G, a, p <- 0

    The recurrence of `fused_recurrent_ttt_linear`, which processes the prompt and returns such states; last bits may
    differ. No gradient and no device synchronisation; two launches on a GPU.

    A row is skipped if its slot is not above `pad_slot_id` or not in the pool: the pool is neither read nor written for
    it, and its output is zero. The live slots of a call must be distinct. An all-zero slot starts a new sequence.

    Args:
        q: [N, 1, H, K] or [1, N, H, K] float32, float16, bfloat16, or float64 (`eager`).
        k: Shape and dtype of q.
        v: [N, 1, HV, V], or [1, N, HV, V], dtype of q; V = K, from 1 to 128. HV is a multiple of H.
        w: [HV, V] any float. Weight of both norms.
        b: [HV, V] any float. Bias of both norms.
        eta: [N, 1, HV, 1] or [N, 1, HV], N and 1 as in q, any float, or a number. Step size.
        pool: `TTTState` of `state` and `grad` [slots, HV, K, V], `bias` and `bias_grad` [slots, HV, 1, V], in float32,
            bfloat16 or float16, any strides, and `position` [slots] int32 or int64, from 0 to chunk_size - 1.
            Arithmetic is float32; values are rounded when stored.
        state_indices: [N] int32 or int64 slot of each row. None: row n uses slot n.
        eta_col, residual, scale, eps, chunk_size: As in `chunk_ttt_linear`.
        pad_slot_id: Indices up to and including this one mark padding rows.
        out: Output buffer, returned: shape of v; dtype of v, or float32 for 16-bit v. Must not overlap other tensors.
        backend: "eager", "triton" or "gluon" demands that backend. None: the best available one.

    Returns:
        o: Shape of v; `out` if given.

    Raises:
        TypeError: An argument has the wrong Python type, or pool is not a TTTState.
        ValueError: A shape, dtype, device or combination is wrong, an argument requires a gradient, or (inside
            `checked`) live slots are not distinct.
        UnsupportedError: No backend, or not the demanded one, serves the device and dtypes.

    Source:
        Learning to (learn at test time), arXiv:2407.04620, sections 2.4 to 2.7: mini-batch TTT, TTT-Linear.

    Examples:
        >>> import torch, wyfold
        >>> from wyfold import serving
        >>> N, H, D, slots = 3, 2, 16, torch.tensor([5, 0, -1])
        >>> S, c = torch.zeros(8, H, D, D), torch.zeros(8, H, 1, D)
        >>> pool = wyfold.TTTState(S, c, S.clone(), c.clone(), torch.zeros(8, dtype=torch.int32))
        >>> q, k, v = (torch.randn(N, 1, H, D) for _ in range(3))
        >>> o = serving.ttt_decode(q, k, v, torch.ones(H, D), torch.zeros(H, D), 0.1, pool, slots)
        >>> pool.position.tolist(), [bool(x.any()) for x in o]
        ([1, 0, 0, 0, 0, 1, 0, 0], [True, True, False])
    """
    if not isinstance(pool, TTTState):
        raise TypeError(f"ttt_decode: pool must be a TTTState, got {type(pool).__name__}")
    numbers, steps = split_numbers(eta, eta_col)
    tensors = q, k, v, w, b, *steps, *pool, state_indices, out
    return planned(_TTT_DECODE, tensors, (*numbers, residual, scale, eps, chunk_size, pad_slot_id, backend))


_OP = "ttt_decode"


def _make_plan(tensors: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[float, str]:
    """Check the call; return the factor of q and the backend that will run it."""
    (q, k, v, eta, eta_col, out), pool = _rows(tensors, values)[0], TTTState(*tensors[7:12])
    w, b, state_indices, (_, _, residual, scale, eps, chunk_size, pad, backend) = *tensors[3:5], tensors[-2], values
    refuse_transforms(_OP, *tensors)
    check_tokens(_OP, q, k, v, w, b, eta, eta_col, None, None)
    given = {"q": q, "k": k, "v": v, "w": w, "b": b, "eta": eta, "eta_col": eta_col, "out": out}
    given |= {f"pool.{name}": x for name, x in zip(TTTState._fields, pool, strict=True)}
    check.no_gradients(_OP, given)
    check_form(_OP, chunk_size, residual, eps, q.dtype)
    cast = in_autocast_dtype(q, k, v)
    check.same_attribute(_OP, "dtype", q=cast[0], k=cast[1], v=cast[2])
    _check_pool(_OP, v, pool)
    check.integer(_OP, "pad_slot_id", pad, least=-1)
    check.rows(_OP, "state_indices", state_indices, v.shape[:1], v=v)
    check.distinct_slots(_OP, state_indices, pool.state.shape[0], pad)
    if out is not None:
        B, T, HV, D = v.shape
        check.shapes(_OP, known={"B": B, "T": T, "HV": HV, "V": D}, out=(out, "B T HV V"))
        check.output_dtype(_OP, out, v=cast[2])
        check.same_attribute(_OP, "device", v=v, out=out)
        check.no_overlap(_OP, out=out)
    D = v.shape[3]

    def trial() -> Trial:
        samples = (
            *(wide_sample(x, "normal" if x is cast[2] else "unit", "BT") for x in cast),
            sample(column(v, eta), "step", "BT"),
            None if eta_col is None else sample(column(v, eta_col), "weight", "BT"),
            wide_sample(w, "weight", ""),
            wide_sample(b, "step", ""),
            *(wide_sample(x, "normal", "S", widths) for x, widths in zip(pool[:4], (2, 1, 2, 1), strict=True)),
            sample(pool.position, "position", "S"),
            slot_samples(state_indices, None)[0],
            wide_sample(v if out is None else out, "normal", "BT"),
        )
        values = -1, residual, max(int(D), LEAST_IN_TRIAL) ** -0.5, float(eps), chunk_size, "triton"
        return Trial(_OP, "serve_ttt", samples, values, (), sequences=9, tokens=1, gradients=False)

    plan = table.plan(
        _OP,
        v.device,
        backend,
        forward=("ttt_decode",),
        dtypes=table.dtypes(*cast, *pool[:4]),
        keys=lambda: [("ttt_decode", table.kernel_module("ttt_decode", "triton").launch_key(D))],
        trials=lambda: (trial(),),
        unrun=int(D) % 8 != 0,
    )
    return int(D) ** -0.5 if scale is None else check.number(_OP, "scale", scale), plan.backend


def _run(plan: tuple[float, str], tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Tensor:
    ((q, k, v, eta, eta_col, out), swapped), slots = _rows(tensors, values), tensors[-2]
    (scale, backend), (_, _, residual, _, eps, chunk_size, pad, _) = plan, values
    refuse_transforms(_OP, *tensors)
    step, col = column(v, eta), None if eta_col is None else column(v, eta_col)
    q, k, v = in_autocast_dtype(q, k, v)
    o = v.new_empty(v.shape) if out is None else out
    source = None if slots is None else slots[:, None]
    call(
        serve_ttt_op, q, k, v, step, col, *tensors[3:5], *tensors[7:12], source, o,
        pad, residual, scale, float(eps), chunk_size, backend,
    )  # fmt: skip
    given: Tensor | None = tensors[-1]
    if given is not None:
        return given
    return o.transpose(0, 1) if swapped else o


_TTT_DECODE = PublicOperator(_make_plan, _run)


def _rows(tensors: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[list[Any], bool]:
    """The tokens of a call, whose arguments may still be invalid, with one token in each row.

    Returns:
        q, k, v, eta and eta_col (tensors or numbers), and out; whether the caller's are [1, N, ..].

    Raises:
        TypeError: q is no tensor.
        ValueError: q is neither [N, 1, ..] nor [1, N, ..].
    """
    (q, k, v, _, _, eta, col, *_, out), (eta_number, col_number, *_) = tensors, values
    eta, col = eta if eta_number is None else eta_number, col if col_number is None else col_number
    swapped = check.tensor(_OP, "q", q).ndim == 4 and q.shape[1] != 1
    if swapped and q.shape[0] != 1:
        raise ValueError(f"{_OP}: q must be [N, 1, H, K] or [1, N, H, K], got {list(q.shape)}")
    tokens = [q, k, v, eta, col, out]
    return [swap_batch_time(x) for x in tokens] if swapped else tokens, swapped


def _check_pool(op: str, v: Tensor, pool: TTTState) -> None:
    HV, D = v.shape[2:]
    orders = {"state": "slots HV K V", "bias": "slots HV 1 V", "grad": "slots HV K V", "bias_grad": "slots HV 1 V"}
    named: dict[str, Any] = {f"pool.{name}": (getattr(pool, name), order) for name, order in orders.items()}
    check.shapes(op, known={"HV": HV, "K": D, "V": D}, **named)
    tensors = {name: x for name, (x, _) in named.items()}
    check.floating(op, check.state_dtypes(v), **tensors)
    check.same_attribute(op, "device", v=v, **tensors)
    position = check.tensor(op, "pool.position", pool.position)
    check.rows(op, "pool.position", position, [pool.state.shape[0]], form="[slots]", v=v)
    check.no_overlap(op, **tensors, **{"pool.position": position})
