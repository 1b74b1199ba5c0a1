"""TTT-Linear: the state is a linear model that learns, by gradient descent, from the keys and values it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.ops.context_call import agreed, check_share
from wyfold.ops.decisions import decided, decision_key
from wyfold.parallel import split
from wyfold.parallel.context import ContextParallel
from wyfold.pipelines.ttt import chunks_per_part, ttt
from wyfold.pipelines.ttt_context import ttt_across
from wyfold.pipelines.ttt_records import TTTOptions, TTTTensors
from wyfold.runtime import check
from wyfold.runtime.chunks import CHUNK_SIZES
from wyfold.runtime.launch import dtype_word
from wyfold.runtime.layout import SequenceLayout, boundaries_of, packed_boundaries
from wyfold.runtime.recall import recalled
from wyfold.runtime.register import in_autocast_dtype
from wyfold.stages import table

WIDEST = 128
RESIDUALS = ("o", "q")


class TTTState(NamedTuple):
    """Where every sequence stands, inside a mini-batch or at its start.

    Attributes:
        state: [N, HV, K, V] matrix the open mini-batch was entered with.
        bias: [N, HV, 1, V] its bias.
        grad: [N, HV, K, V] sum of k n^T over the open mini-batch's tokens; zero where `position` is. Factors
            `eta_col` are in it.
        bias_grad: [N, HV, 1, V] sum of n, likewise.
        position: [N] int32 or int64. Tokens of the open mini-batch, from 0 to chunk_size - 1.
    """

    state: Tensor
    bias: Tensor
    grad: Tensor
    bias_grad: Tensor
    position: Tensor


def chunk_ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    *,
    eta_col: Tensor | float | None = None,
    residual: str = "o",
    scale: float | None = None,
    eps: float = 1e-6,
    chunk_size: int = 16,
    initial_state: Tensor | None = None,
    initial_state_bias: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    cp_context: ContextParallel | None = None,
    disable_recompute: bool = False,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """TTT-Linear over whole sequences, mini-batch by mini-batch.

    Per value head, (S0, c0) being the state that a mini-batch of `chunk_size` tokens was entered with and LN the norm
    of a row to mean 0 and variance 1:

        n_t = gradient of 1/2 |w LN(z) + b - (v_t - k_t)|^2 at z = S0^T k_t + c0, times eta_col_t
        S_t = S0 - eta_t sum_{s<=t} k_s n_s^T        c_t = c0 - eta_t sum_{s<=t} n_s
        h_t = scale S_t^T q_t + c_t                  o_t = h_t + w LN(h_t) + b

    Published layers step along n_s by a number of both tokens, eta_t eta_col_s, and end in o_t = q_t + w LN(h_t) + b,
    which is residual="q".

    The last token's (S_t, c_t) enters the next mini-batch. The last mini-batch of a sequence may be short: the states
    that are returned are those of its last token, so going on from them starts a new mini-batch;
    `fused_recurrent_ttt_linear` goes on inside one.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64 on eager. Any strides. Never written.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q; V = K, a multiple of 8 up to 128. HV is a multiple of H: value head j reads query
            and key head `j // (HV // H)`. The inner model learns v - k from k.
        w: [HV, V] any float. Weight of both norms.
        b: [HV, V] any float. Bias of both norms.
        eta: [B, T, HV, 1] or [B, T, HV] any float, or a number. Step size of a token; it rescales the whole sum of its
            mini-batch, it does not weigh the token; `eta_col` does.
        eta_col: As eta. Factor of a token's own gradient, in its mini-batch and beyond. None: 1.
        residual: What the norm of what was read is added to: "o", itself, or "q", the query without `scale`.
        scale: Multiplies the q that reads. None: K ** -0.5; published layers have 1.
        eps: > 0, added to the variances.
        chunk_size: 16, 32 or 64. Tokens of a mini-batch, counted from each sequence's first: part of the model, not a
            tile.
        initial_state: [N, HV, K, V] (with state_v_first [N, HV, V, K]) float32, float16, bfloat16. None: zeros.
        initial_state_bias: [N, HV, 1, V], as initial_state. None: zeros. Each may be given without the other.
        output_final_state: Return the states after every sequence's last token.
        state_v_first: Matrix states are V-first, in and out.
        state_dtype: Storage of returned states. None: float32 (float64 inputs: float64).
        cu_seqlens: [N+1] int32 or int64 boundaries of packed sequences, or a `SequenceLayout`; B is 1. An empty
            sequence returns its initial state bit for bit; rows past the last boundary are never read, their o is zero.
        cp_context: From `wyfold.cp.build_cp_context`, in the place of cu_seqlens: the tensors are this rank's share of
            a buffer that the ranks of a group hold together; a rank's edge must not lie inside a mini-batch. Initial
            states are those of the sequences that begin here (`starts`), final states those of the ones that end here
            (`ends`); of w and b each rank gets its own share of the gradient. States go from rank to rank: memory is
            split, the time of one sequence is not.
        disable_recompute: On eager, keep for the backward the state of every mini-batch, which it would run the forward
            again for: memory for time, same bits. Kernels keep the states of every fourth mini-batch of 16 and two
            tensors like v either way, since walking again would need as much memory at its most.
        batch_invariant: A sequence's bits never depend on its neighbours, flag or not; here it changes nothing.
        backend: None: the table's choice. "eager", "triton", "gluon": a demand.

    Returns:
        o: [B, T, HV, V], dtype of v.
        final_state: [N, HV, K, V] (with state_v_first [N, HV, V, K]), or None unless asked for.
        final_state_bias: [N, HV, 1, V], or None unless asked for.

    Differentiable in every tensor, once; gradients have their argument's dtype and are rounded once.

    Raises:
        TypeError: an argument of the wrong Python type.
        ValueError: shape, dtype, device or range; `cu_seqlens` with B > 1.
        UnsupportedError: the demanded backend cannot.
        RuntimeError: a gradient of a gradient was asked for.

    Source:
        Learning to (learn at test time), arXiv:2407.04620: TTT-Linear, inner mini-batches and their dual form.

    Example:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(1, 100, 2, 16) for _ in range(3))
        >>> w, b = torch.ones(2, 16), torch.zeros(2, 16)
        >>> o, S, c = wyfold.chunk_ttt_linear(q, k, v, w, b, 0.1, output_final_state=True)
        >>> o.shape, S.shape, c.shape
        (torch.Size([1, 100, 2, 16]), torch.Size([1, 2, 16, 16]), torch.Size([1, 2, 1, 16]))
    """
    op = "chunk_ttt_linear"
    form = _Form(residual, scale, eps, chunk_size, state_v_first, state_dtype, output_final_state, disable_recompute)
    states = initial_state, initial_state_bias

    def decide() -> TTTOptions:
        key = _decided_by(
            op, (q, k, v, w, b, eta, eta_col, *states), cu_seqlens, cp_context, (*form, batch_invariant), backend
        )
        return decided(key, checked)

    def checked() -> TTTOptions:
        check.flag(
            op,
            output_final_state=output_final_state,
            state_v_first=state_v_first,
            disable_recompute=disable_recompute,
            batch_invariant=batch_invariant,
        )
        cu, N = check_tokens(op, q, k, v, w, b, eta, eta_col, cu_seqlens)
        given = N
        if cp_context is not None:
            given = _check_context(op, cp_context, q, cu, chunk_size)
        check.dtype_option(op, "state_dtype", state_dtype, check.state_dtypes(q))
        order = "N HV V K" if state_v_first else "N HV K V"
        named = {"initial_state": (initial_state, order), "initial_state_bias": (initial_state_bias, "N HV 1 V")}
        _check_states(op, v, given, named, optional=tuple(named))
        return _decide(op, (q, k, v, w, b, eta, eta_col, *states), cu, N, form, backend, cp_context)

    def tensors() -> TTTTensors:
        return _tensors(q, k, v, w, b, eta, eta_col, cu_seqlens)._replace(state=initial_state, bias=initial_state_bias)

    def run() -> tuple[Tensor, Tensor | None, Tensor | None]:
        if cp_context is None:
            options = decide()
            result = ttt(tensors(), options)
        else:
            options = agreed(op, cp_context, q, decide, lambda options: _alike_on_ranks(tensors(), options))
            result = ttt_across(tensors(), options, cp_context)
        return (result.o, result.state, result.bias) if output_final_state else (result.o, None, None)

    if cp_context is not None:
        return run()
    numbers, steps = numbers_apart(eta, eta_col)
    cu, tokens_of_layout = boundaries_of(cu_seqlens)
    values = op, *numbers, tokens_of_layout, *form, batch_invariant, backend
    return recalled((q, k, v, w, b, *steps, *states, cu), values, run)


fused_chunk_ttt_linear = chunk_ttt_linear


def fused_recurrent_ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    *,
    eta_col: Tensor | float | None = None,
    residual: str = "o",
    scale: float | None = None,
    eps: float = 1e-6,
    chunk_size: int = 16,
    state: TTTState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    backend: str | None = None,
) -> tuple[Tensor, TTTState | None]:
    """TTT-Linear from any token to any other: the form for decoding.

    The recurrence of `chunk_ttt_linear`, with the mini-batch that the last token falls into left open: calls that hand
    the `TTTState` on give the outputs of one call, wherever they are cut. Sequences may stand at different positions.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64 on eager.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q; V = K.
        w: [HV, V] any float.
        b: [HV, V] any float.
        eta: [B, T, HV, 1] or [B, T, HV] any float, or a number.
        eta_col, residual, scale, eps, chunk_size, cu_seqlens, backend: As in `chunk_ttt_linear`.
        state: Where the sequences stand; None: at their start, with zero states. A constant to the backward: no
            gradient reaches it.
        output_final_state: Return where the sequences stand afterwards, differentiable in this call's arguments.

    Returns:
        o: [B, T, HV, V], dtype of v.
        final_state: `TTTState` with float32 states (float64 inputs: float64), or None unless asked for. An empty
            sequence's are the given ones bit for bit.

    Raises:
        TypeError: an argument of the wrong Python type; state is no TTTState.
        ValueError: shape, dtype, device or range; a position outside its mini-batch.
        UnsupportedError: the demanded backend cannot.

    Source:
        Learning to (learn at test time), arXiv:2407.04620.

    Example:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
        >>> w, b, state = torch.ones(2, 16), torch.zeros(2, 16), None
        >>> for t in range(20):
        ...     token = (x[:, t : t + 1] for x in (q, k, v))
        ...     o, state = wyfold.fused_recurrent_ttt_linear(*token, w, b, 0.1, state=state, output_final_state=True)
        >>> state.position.tolist()
        [4]
    """
    op = "fused_recurrent_ttt_linear"
    form = _Form(residual, scale, eps, chunk_size, False, None, output_final_state, False)
    parts = None if state is None else _parts(op, state)

    def checked() -> TTTOptions:
        check.flag(op, output_final_state=output_final_state)
        cu, N = check_tokens(op, q, k, v, w, b, eta, eta_col, cu_seqlens)
        if parts is not None:
            _check_state(op, v, N, parts)
        return _decide(op, (q, k, v, w, b, eta, eta_col, None, None), cu, N, form, backend, None, recurrent=True)

    options = decided(
        _decided_by(op, (q, k, v, w, b, eta, eta_col, *(parts or ())), cu_seqlens, None, form, backend), checked
    )
    tensors = _tensors(q, k, v, w, b, eta, eta_col, cu_seqlens)
    if parts is not None:
        S, c, G, a, position = (x.detach() for x in parts)
        tensors = tensors._replace(state=S, bias=c, grad=G, bias_grad=a, position=position)
    result = ttt(tensors, options)
    return result.o, TTTState(*result[1:]) if output_final_state else None


class _Form(NamedTuple):
    """Arguments that are no tensors, and that a decision depends on."""

    residual: str
    scale: float | None
    eps: float
    chunk_size: int
    state_v_first: bool
    state_dtype: torch.dtype | None
    final_state: bool
    keep_states: bool


def _decided_by(
    op: str,
    given: tuple[Any, ...],
    cu_seqlens: Tensor | SequenceLayout | None,
    context: ContextParallel | None,
    values: tuple[Any, ...],
    backend: str | None,
) -> tuple[Any, ...] | None:
    """Everything that a decision looks at, by value; None if it must not be reused."""
    if context is not None:
        return None
    tokens = 0
    if isinstance(cu_seqlens, SequenceLayout):
        tokens, cu_seqlens = cu_seqlens.tokens, cu_seqlens.cu_seqlens
    numbers, tensors = numbers_apart(*given)  # step sizes
    return decision_key((*tensors, cu_seqlens), (op, tokens, numbers, *map(type, numbers), *values, backend), backend)


def numbers_apart(*given: Any) -> tuple[tuple[float | None, ...], tuple[Any, ...]]:
    """Those that are numbers, and those that are not, with None in the others' places."""
    numbers = tuple([x if isinstance(x, float | int) else None for x in given])
    return numbers, tuple([x if number is None else None for x, number in zip(given, numbers, strict=True)])


def _tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    eta_col: Tensor | float | None,
    cu_seqlens: Tensor | SequenceLayout | None,
) -> TTTTensors:
    """Of a call that was checked, without states."""
    cu = cu_seqlens.cu_seqlens if isinstance(cu_seqlens, SequenceLayout) else cu_seqlens
    steps = column(v, eta), None if eta_col is None else column(v, eta_col)
    q, k, v = in_autocast_dtype(q, k, v)
    return TTTTensors(q, k, v, w, b, *steps, None, None, None, None, None, cu)


def _decide(
    op: str,
    given: tuple[Any, ...],
    cu: Tensor | None,
    N: int,
    form: _Form,
    backend: str | None,
    context: ContextParallel | None,
    *,
    recurrent: bool = False,
) -> TTTOptions:
    """Check what both forms share, and decide.

    Args:
        given: q, k, v, w, b, eta, eta_col, and states that a gradient may go to.
        cu, N: Boundaries, and the number of sequences.
    """
    check.choice(op, "chunk_size", form.chunk_size, CHUNK_SIZES)
    check.choice(op, "residual", form.residual, RESIDUALS)
    if check.number(op, "eps", form.eps) <= 0:
        raise ValueError(f"{op}: eps must be > 0, got {form.eps}")
    q, k, v = in_autocast_dtype(*given[:3])
    B, T, _, D = v.shape
    scale = D**-0.5 if form.scale is None else check.number(op, "scale", form.scale)
    check.alike(op, "dtype", q=q, k=k, v=v)
    packed = None if cu is None and not recurrent else N
    stages, C = ("ttt_open",) if recurrent else ("ttt",), form.chunk_size
    plan = table.plan(
        op,
        v.device,
        backend,
        forward=stages,
        backward=stages,
        dtypes=table.dtypes(q, k, v),
        chunk_size=C,
        parts=split.part_count(B, T, packed, C, chunks_per_part(v, C)),
        collectives=() if context is None else _collectives(context, v),
        keys=lambda: _launch_keys(v.device, q.dtype, D, C),
        sizes=() if q.dtype == torch.float64 else (("ttt", f"{dtype_word(q.dtype)} K{int(D)} C{C}"),),
    )
    return TTTOptions(
        operator=op,
        recurrent=recurrent,
        residual=form.residual,
        scale=scale,
        eps=float(form.eps),
        chunk_size=C,
        state_v_first=form.state_v_first,
        state_dtype=form.state_dtype or check.state_dtypes(q)[0],
        final_state=form.final_state,
        save=torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given),
        keep_states=form.keep_states,
        backend=plan.backend,
    )


def _launch_keys(device: torch.device, dtype: torch.dtype, D: int, C: int) -> list[tuple[str, str]]:
    """Of `plan`: what a walk reads on its way needs no launch of its own."""
    walk, read, *back = [("ttt", key) for key in table.launches("ttt", "triton").launch_keys(dtype, D, C)]
    both = table.language("ttt", "triton", walk[1], device) == "gluon"
    return [walk, *back] if both else [walk, read, *back]


def _check_context(op: str, context: ContextParallel, q: Tensor, cu: Tensor | None, chunk_size: int) -> int:
    """The number of sequences that begin here."""
    check_share(op, context, "q", q, cu)
    for piece in (piece for chain in context.shares.chains for piece in chain[:-1]):
        end = piece.done + piece.length
        if chunk_size in CHUNK_SIZES and end % chunk_size:
            raise ValueError(
                f"{op}: cp_context must cut sequences between mini-batches, at multiples of chunk_size = {chunk_size} "
                f"tokens, got sequence {piece.sequence} cut after {end}; layout='fragments' cuts anywhere"
            )
    return q.shape[0] * len(context.starts)


def _collectives(context: ContextParallel, v: Tensor) -> tuple[str, ...]:
    """What the ranks of a call hand on, one line for each direction."""
    depth, (B, _, HV, D) = context.shares.depth, v.shape
    size = f"{B} x {HV} x {D + 1} x {D} for each sequence handed on"
    return tuple(f"{depth} all-gathers {way} of {size}" for way in ("forward", "backward")) if depth else ()


def _alike_on_ranks(t: TTTTensors, options: TTTOptions) -> dict[str, object]:
    """What must be equal on all ranks of a call."""
    (B, _, H, _), (HV, D) = t.q.shape, t.v.shape[2:]
    sizes = {"B": B, "H": H, "HV": HV, "D": D, "dtype of q": t.q.dtype, "eta_col given": t.eta_col is not None}
    asked = {name: getattr(options, name) for name in ("residual", "scale", "eps", "chunk_size")}
    return {**sizes, **asked, "requires_grad": options.save}


def check_tokens(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    eta_col: Tensor | float | None,
    cu_seqlens: Tensor | SequenceLayout | None,
) -> tuple[Tensor | None, int]:
    """The boundaries as a tensor, and the number of sequences."""
    step, factor = (x if isinstance(x, Tensor) else None for x in (eta, eta_col))
    sizes = check.shapes(
        op,
        optional=[name for name, x in (("eta", step), ("eta_col", factor)) if x is None],
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T HV V"),
        w=(w, "HV V"),
        b=(b, "HV V"),
        eta=(step, "B T HV" if step is not None and step.ndim == 3 else "B T HV 1"),
        eta_col=(factor, "B T HV" if factor is not None and factor.ndim == 3 else "B T HV 1"),
    )
    if step is None:
        check.number(op, "eta", eta)
    if factor is None and eta_col is not None:
        check.number(op, "eta_col", eta_col)
    check.head_groups(op, sizes["H"], sizes["HV"])
    check.width(op, "K", "q and k", sizes["K"], most=WIDEST)
    if sizes["V"] != sizes["K"]:
        raise ValueError(f"{op}: v must have the width of q and k, V = K = {sizes['K']}, got {sizes['V']}")
    check.floating(op, q=q, k=k, v=v, w=w, b=b, eta=step, eta_col=factor)
    check.alike(op, "device", q=q, k=k, v=v, w=w, b=b, eta=step, eta_col=factor)
    if cu_seqlens is None:
        return None, sizes["B"]
    cu = packed_boundaries(op, q, cu_seqlens)
    return cu, cu.shape[0] - 1


def _parts(op: str, state: TTTState) -> TTTState:
    """The state, if it is one."""
    if not isinstance(state, TTTState):
        raise TypeError(f"{op}: state must be a TTTState or None, got {type(state).__name__}")
    return state


def _check_state(op: str, v: Tensor, N: int, state: TTTState) -> None:
    tensors, position = state[:4], check.tensor(op, "state.position", state.position)
    orders = ("N HV K V", "N HV 1 V") * 2
    named = {f"state.{name}": (x, order) for name, x, order in zip(TTTState._fields, tensors, orders)}
    _check_states(op, v, N, named)
    if list(position.shape) != [N] or position.dtype not in (torch.int32, torch.int64):
        got = f"{list(position.shape)} {str(position.dtype).removeprefix('torch.')}"
        raise ValueError(f"{op}: state.position must be [N] = [{N}] int32 or int64, got {got}")
    check.alike(op, "device", v=v, **{"state.position": position})


def _check_states(
    op: str, v: Tensor, N: int, states: Mapping[str, tuple[Tensor | None, str]], *, optional: tuple[str, ...] = ()
) -> None:
    """States fit the tokens: their letters' sizes, device and dtype."""
    sizes = {"N": N, "HV": v.shape[2], "K": v.shape[3], "V": v.shape[3]}
    check.shapes(op, optional=optional, known=sizes, **states)
    tensors = {name: state for name, (state, _) in states.items()}
    check.floating(op, check.state_dtypes(v), **tensors)
    check.alike(op, "device", v=v, **tensors)


def column(v: Tensor, eta: Tensor | float) -> Tensor:
    """Step sizes, or factors of them, as [B, T, HV, 1]."""
    if isinstance(eta, Tensor):
        return eta if eta.ndim == 4 else eta.unsqueeze(-1)
    return torch.full((1, 1, 1, 1), eta, dtype=check.state_dtypes(v)[0], device=v.device).expand(*v.shape[:3], 1)
