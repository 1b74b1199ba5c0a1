"""torch.compile(fullgraph=True) of layers and of the decoder: number of compilations, and errors.

The truth of every result is the same module in float64 on eager launches. A compiler fuses operations and rounds at
other places, so bits are not promised. A result may be twice as far from the truth as the uncompiled one, plus two
roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tools.proofs.serving_promises import Promise
from torch import Tensor, nn

from wyfold.models import MIXERS, Decoder, DecoderConfig
from wyfold.reference import error

OPERATOR_SPECS = ("delta_net", "gated_delta_net", "kda", "ttt_linear", "decoder")
BACKENDS = ("aot_eager", "inductor")
LENGTHS = (256, 192, 333, 100)
COMPILATIONS = 2
"""Allowed compilations: one for the first length, one for all others."""


@dataclass(frozen=True)
class Sizes:
    """Sizes with eight heads: the compiler pads a projection onto fewer (docs/facts/compilers.md, INDUCTOR-1)."""

    heads: int = 8
    width: int = 64
    batch: int = 2


SMALL = Sizes(8, 8, 1)


def _made(subject: str, sizes: Sizes, backend: str | None) -> nn.Module:
    hidden = sizes.heads * sizes.width // 2
    if subject == "decoder":
        return Decoder(
            DecoderConfig(
                hidden_size=hidden, num_layers=3, pattern="gdn kda delta_net", num_heads=sizes.heads,
                head_dim=sizes.width,
            ),
            backend=backend,
        )  # fmt: skip
    return MIXERS[subject](hidden, sizes.heads, head_dim=sizes.width, backend=backend)


def _results(run: Callable[..., Any], module: nn.Module, given: Tensor, fed: Tensor) -> dict[str, Tensor]:
    """Output and every gradient; a decoder's labels are its input tokens."""
    module.zero_grad()
    if not given.is_floating_point():
        logits, loss = run(given[:, :-1], given[:, 1:])
        loss.backward()
        found = {"logits": logits}
    else:
        x = given.detach().clone().requires_grad_()
        y = run(x)
        y.backward(fed.to(y.dtype))
        assert x.grad is not None
        found = {"y": y, "dx": x.grad}
    gradients = {f"d{name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: x.detach().clone() for name, x in (found | gradients).items()}


def compiled(
    subject: str, compiler: str, device: torch.device, backend: str | None, sizes: Sizes, figures: dict[str, Any]
) -> Iterator[Promise]:
    """Promises for one module under one of PyTorch's compilers.

    Args:
        subject: One of `SUBJECTS`.
        compiler: One of `BACKENDS`.
        device: Device of the module.
        backend: Backend of its operators.
        sizes: Sizes of the module.
        figures: Gets the number of compilations after each length, and the largest error relative to its limit.
    """
    from torch._dynamo.testing import CompileCounterWithBackend  # a slow import that other parts do not need

    torch.manual_seed(0)
    module = _made(subject, sizes, backend).to(device, torch.bfloat16)
    exact = _made(subject, sizes, "eager").to(device)
    exact.load_state_dict(module.state_dict())
    exact.double()
    counter = CompileCounterWithBackend(compiler)
    run = torch.compile(module, backend=counter, fullgraph=True)
    counts: list[int] = []
    shares: dict[str, float] = {}
    figures |= {"compilations": counts, "lengths": LENGTHS}
    torch._logging.set_logs(recompiles=True)  # the reasons are in the part's output if a promise breaks

    def tried(T: int) -> str:
        draw = torch.Generator().manual_seed(T)
        if subject == "decoder":
            given = torch.randint(256, (sizes.batch, T + 1), generator=draw).to(device)
        else:
            hidden = sizes.heads * sizes.width // 2
            given = torch.randn(sizes.batch, T, hidden, generator=draw).to(device, torch.bfloat16)
        fed = torch.randn(given.shape, generator=draw).to(device, torch.bfloat16)
        got = _results(run, module, given, fed)
        counts.append(counter.frame_count)
        plain = _results(module, module, given, fed)
        truth = _results(exact, exact, given.double() if given.is_floating_point() else given, fed)
        wrong = []
        for name, x in truth.items():
            allowed = 2 * error.rms(plain[name], x) + 2 * error.floor(x, got[name].dtype)
            far = error.rms(got[name], x)
            shares[f"{T} {name}"] = far / allowed if allowed else 0.0
            if not far <= allowed:
                wrong.append(f"{name} {far:.1e}, allowed {allowed:.1e}")
        most = max(shares, key=lambda name: shares[name])
        figures["largest share"] = f"{shares[most]:.2f}, {most}"
        return "; ".join(wrong)

    for T in LENGTHS:
        yield Promise("compile", f"{subject}, {compiler}: forward and backward of {T} tokens", lambda T=T: tried(T))
    yield Promise(
        "compile",
        f"{subject}, {compiler}: {COMPILATIONS} compilations at most",
        lambda: "" if counts and counts[-1] <= COMPILATIONS else f"compilations after each length: {counts}",
    )
