"""A whole layer of the delta family on kernels, between its input and its output projection: one autograd function.

    forward     products (read, strength, decay, gate), conv, the rule's launches, norm, product (out)
    backward    norm again, products (out), norm, the rule's launches, conv, products (strength, decay, gate, read)

Separate autograd functions for a layer's projections, convolution, rule and norm cost the host more time than their
launches, and the device concatenates the gradients of q, k and v, and adds those of x. Here the rule writes its
gradients of q, k and v where the convolution reads them, and the products of x's gradient are added as they are made.
Both directions are recorded as a whole (`runtime/replay_cache.py`).

Where nothing else needs the graph, the backward writes over saved tensors that it has read for the last time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wyfold.autograd.delta import implementation_for
from wyfold.autograd.delta_records import DIFFERENTIABLE, ROWS, DeltaBackwardInputs, DeltaTensors
from wyfold.autograd.mixer_records import MixerOptions, MixerTensors, Saved
from wyfold.kernels import table
from wyfold.kernels.conv import ConvGradients
from wyfold.kernels.norm import RmsNormGradients
from wyfold.runtime import torch_modes
from wyfold.runtime.differentiation import by_member_under_vmap, once_differentiable
from wyfold.runtime.replay_cache import KnownCall, find_call
from wyfold.runtime.torch_ops import on_device_of


class Mixer(torch.autograd.Function):
    """A layer's call from its input to its output."""

    @staticmethod
    def forward(ctx: Any, known: KnownCall, options: MixerOptions, *tensors: Any) -> Any:
        y, *saved = known.run(lambda: _forward(tensors, options))
        ctx.set_materialize_grads(False)
        ctx.options, ctx.own = options, _saved_without_hooks()
        ctx.save_for_backward(*tensors, *saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        if dy is None:
            return (None,) * (2 + len(needs))
        if torch_modes.transforming() is not None:
            return by_member_under_vmap(Mixer.backward, ctx, dy)
        options, tensors = ctx.options, (*ctx.saved_tensors, dy)
        reuse = ctx.own and not getattr(ctx, "repeated", False) and _read_for_the_last_time()
        run = lambda: _backward(tensors, options, needs, reuse=reuse)
        known = find_call("mixer_bwd", tensors, (*options.values(), *needs, reuse))
        gradients = iter(run() if known is None else known.run(run))
        return None, None, *[next(gradients) if need else None for need in needs]


def _saved_without_hooks() -> bool:
    """Whether no hook gets the tensors that are saved now."""
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return hooks is not None and hooks(False) is None


def _read_for_the_last_time() -> bool:
    """Whether the graph of the backward that runs is not kept, so that its saved tensors are not read again."""
    kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return kept is not None and not kept()


def _forward(tensors: tuple[Any, ...], options: MixerOptions) -> tuple[Any, ...]:
    """Run the forward; return y and everything that the backward reads besides the arguments."""
    t, backend = MixerTensors(*tensors), options.rule.backend
    with on_device_of(t.x):
        rows = t.x.flatten(0, 1)
        read, strength = _product(rows, t.read.t()), _product(rows, t.strength.t())
        decay_low, decay = _projected(rows, t.decay_down, t.decay, None)
        gate_low, gate = _projected(rows, t.gate_down, t.gate, t.gate_bias)
        mixed = read.new_empty(read.shape)
        conv = table.kernel_module("conv", backend).conv
        conv(read, t.conv, t.conv_bias, None, None, _boundaries(t), options.activated, mixed, None)
        rule = _rule_tensors(t, options, mixed, decay, strength)
        result, of_rule = implementation_for(options.rule).forward(rule, options.rule)
        y = t.x.new_empty(*t.x.shape[:2], t.out.shape[0])
        torch.mm(_normed(t, options, result.o, gate), t.out.t(), out=y.flatten(0, 1))
    return y, *Saved(read, mixed, strength, decay_low, decay, gate_low, gate, result.o), *of_rule


def _backward(tensors: tuple[Any, ...], options: MixerOptions, needs: tuple[bool, ...], *, reuse: bool) -> list[Tensor]:
    """Run the backward; return the gradients that are needed, in the order of the arguments.

    Args:
        tensors: Arguments of the forward, what it kept, and the gradient of y.
        options: Those of the forward.
        needs: For each of `MixerTensors`, whether its gradient is needed.
        reuse: Whether kept tensors may be written over.
    """
    end, kept_end = len(needs), len(needs) + len(Saved._fields)
    t, kept, dy = MixerTensors(*tensors[:end]), Saved(*tensors[end:kept_end]), tensors[-1]
    wanted = [name for name, need in zip(MixerTensors._fields, needs, strict=True) if need]
    found: dict[str, Any] = dict.fromkeys(wanted)
    overwritten = (lambda x: x) if reuse else (lambda x: x.new_empty(x.shape))
    with on_device_of(t.x):
        rows, d_rows = t.x.flatten(0, 1), dy.reshape(-1, dy.shape[2])
        d_normed = kept.gate.new_empty(kept.gate.shape)
        if "out" in found:
            found["out"] = _product(d_rows.t(), _normed(t, options, kept.o, kept.gate, d_normed))
        torch.mm(d_rows, t.out, out=d_normed)
        d_o, d_gate = overwritten(kept.o), overwritten(kept.gate)
        _norm_gradients(t, kept, options, (d_normed, d_o, d_gate), found)
        del d_normed
        d_mixed, d_decay, d_strength = _rule_gradients(t, kept, options, list(tensors[kept_end:-1]), d_o, found)
        del d_o
        d_read = overwritten(kept.mixed)
        _conv_gradients(t, kept, options, (d_mixed, d_read), found)
        del d_mixed
        if "gate_bias" in found:
            found["gate_bias"] = d_gate.sum(0)
        if "x" in found:
            found["x"] = t.x.new_empty(t.x.shape)
        # The largest term comes last: the sum is rounded after each.
        back = _ProjectionGradients(rows, found)
        back.add("strength", d_strength, t.strength)
        back.add_two("decay", d_decay, kept.decay_low, t.decay_down, t.decay)
        back.add_two("gate", d_gate, kept.gate_low, t.gate_down, t.gate)
        back.add("read", d_read, t.read)
    return [found[name] for name in wanted]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of a and b, in memory that a replay allocates as it does that of a launch."""
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def _projected(rows: Tensor, down: Tensor | None, up: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Rows after one projection, or after two; and the result of the first of two."""
    low = None if down is None else _product(rows, down.t())
    source = rows if low is None else low
    if bias is None:
        return low, _product(source, up.t())
    return low, torch.addmm(bias, source, up.t(), out=rows.new_empty(rows.shape[0], up.shape[0]))


def _boundaries(t: MixerTensors) -> Tensor | int:
    """Boundaries of the sequences, as the convolution's kernels take them."""
    return t.x.shape[1] if t.cu_seqlens is None else t.cu_seqlens


def _heads(t: MixerTensors, options: MixerOptions, mixed: Tensor, decay: Tensor, strength: Tensor) -> list[Tensor]:
    """Views of rows as q, k, v, g and beta of the rule."""
    (H, HV, K, V), tokens = options.heads, t.x.shape[:2]
    q, k, v = mixed.view(*tokens, -1).split_with_sizes((H * K, H * K, HV * V), -1)
    g = decay.view(*tokens, HV, *t.dt_bias.shape[1:])
    return [q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), g, strength.view(*tokens, HV)]


def _rule_tensors(
    t: MixerTensors, options: MixerOptions, mixed: Tensor, decay: Tensor, strength: Tensor
) -> DeltaTensors:
    q, k, v, g, beta = _heads(t, options, mixed, decay, strength)
    return DeltaTensors(q, k, v, g, beta, None, t.A_log, t.dt_bias, t.cu_seqlens, None)


def _normed(t: MixerTensors, options: MixerOptions, o: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor:
    """The rule's output after the gated norm. Reading it again costs as much memory as o, computing it again 1 %."""
    V, normed = options.heads[3], gate.new_empty(gate.shape) if out is None else out
    norm = table.kernel_module("norm", options.rule.backend).rms_norm_gated
    norm(o.view(-1, V), gate.view(-1, V), t.norm, None, options.norm, normed.view(-1, V))
    return normed


def _norm_gradients(
    t: MixerTensors, kept: Saved, options: MixerOptions, into: tuple[Tensor, Tensor, Tensor], found: dict[str, Any]
) -> None:
    """Write the gradients of the norm's rows and weight. into: that of its result, those of o and gate."""
    V = options.heads[3]
    d_weight = t.norm.new_empty(t.norm.shape) if "norm" in found else None
    o, gate, d_normed, d_o, d_gate = (x.view(-1, V) for x in (kept.o, kept.gate, *into))
    norm_bwd = table.kernel_module("norm", options.rule.backend).rms_norm_gated_bwd
    norm_bwd(o, gate, t.norm, None, d_normed, options.norm, RmsNormGradients(d_o, d_gate, d_weight, None))
    found["norm"] = d_weight


def _rule_gradients(
    t: MixerTensors, kept: Saved, options: MixerOptions, of_rule: list[Tensor], d_o: Tensor, found: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the gradients of the decay's parameters; return those of `mixed`, `decay` and `strength`."""
    written: list[Tensor] = []

    def rows() -> list[Tensor]:
        if not written:  # after the factors are freed, whose memory they may take
            written.extend(x.new_empty(x.shape) for x in (kept.mixed, kept.decay, kept.strength))
        return _heads(t, options, *written)

    rule = _rule_tensors(t, options, kept.mixed, kept.decay, kept.strength)
    needs = [True] * ROWS + [name in found for name in DeltaTensors._fields[ROWS:DIFFERENTIABLE]]
    given = DeltaBackwardInputs(rule, options.rule, of_rule, d_o, None, needs, rows)
    gradients = given.to_input_dtypes(implementation_for(options.rule).backward(given))
    found |= {name: dx for name, dx in zip(DeltaTensors._fields, gradients) if name in found}
    d_mixed, d_decay, d_strength = written
    return d_mixed, d_decay, d_strength


def _conv_gradients(
    t: MixerTensors, kept: Saved, options: MixerOptions, into: tuple[Tensor, Tensor], found: dict[str, Any]
) -> None:
    """Write the gradients of the convolution. into: that of its result, that of its input."""
    d_mixed, d_read = into
    d_weight = t.conv.new_empty(t.conv.shape) if "conv" in found else None
    d_bias = t.conv_bias.new_empty(t.conv_bias.shape) if "conv_bias" in found and t.conv_bias is not None else None
    out = ConvGradients(d_read, None if d_weight is None else d_weight.t(), d_bias, None)
    conv_bwd = table.kernel_module("conv", options.rule.backend).conv_bwd
    arguments = kept.read, t.conv, t.conv_bias, None, _boundaries(t), options.activated
    conv_bwd(*arguments, d_mixed, None, torch.float32, out)
    found["conv"], found["conv_bias"] = d_weight, d_bias


class _ProjectionGradients:
    """Gradients of projections of x: those of the weights, and the sum of those of x.

    Args:
        rows: x, a row for each token.
        found: Has a key for every gradient that is needed; for x its memory.
    """

    def __init__(self, rows: Tensor, found: dict[str, Any]):
        self.rows, self.found = rows, found
        self.dx, self.empty = found["x"].flatten(0, 1) if "x" in found else None, True

    def add(self, name: str, d: Tensor, weight: Tensor) -> None:
        """Add a projection, from the gradient of its result."""
        if name in self.found:
            self.found[name] = _product(d.t(), self.rows)
        if self.dx is None:
            return
        if self.empty:
            torch.mm(d, weight, out=self.dx)
        else:
            self.dx.addmm_(d, weight)
        self.empty = False

    def add_two(self, name: str, d: Tensor, low: Tensor | None, down: Tensor | None, up: Tensor) -> None:
        """Add two projections, of which the second has the first one's result, or the second alone."""
        if low is None or down is None:
            self.add(name, d, up)
            return
        if name in self.found:
            self.found[name] = _product(d.t(), low)
        self.add(f"{name}_down", _product(d, up), down)
