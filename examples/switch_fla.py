"""A script for fla, switched to Wyfold by changing its imports only; it then also runs on a CPU.

    python examples/switch_fla.py                 # under a minute on a CPU

A gated delta rule layer learns associative recall: key-value pairs, then a key whose value it must predict. It trains
in chunks and answers token by token, from its states.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

# It was:
#   from fla.modules import FusedRMSNormGated, ShortConvolution
#   from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from wyfold.integrations.fla import (
    FusedRMSNormGated,
    ShortConvolution,
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
)

# For a package that imports fla and that you cannot edit, run this before importing it:
#   import wyfold.integrations.fla
#   wyfold.integrations.fla.install()

States = dict[str, Tensor | None]


class Mixer(nn.Module):
    """Projections, short convolution, gated delta rule, gated norm."""

    def __init__(self, width: int, heads: int, head_dim: int):
        super().__init__()
        self.heads, inner = heads, heads * head_dim
        self.qkv, self.gates = nn.Linear(width, 3 * inner, bias=False), nn.Linear(width, 2 * heads)
        self.out_gate, self.out = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.conv = ShortConvolution(3 * inner, 4, activation="silu")
        self.norm = FusedRMSNormGated(head_dim)

    def forward(self, x: Tensor, states: States | None = None) -> Tensor:
        keep = states is not None
        mixed, conv_state = self.conv(
            self.qkv(x), cache=states["conv"] if states is not None else None, output_final_state=keep
        )
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in mixed.chunk(3, -1))
        beta, decay = self.gates(x).chunk(2, -1)
        rule = fused_recurrent_gated_delta_rule if keep and x.shape[1] == 1 else chunk_gated_delta_rule
        o, state = rule(
            q,
            k,
            v,
            g=logsigmoid(decay + 4),
            beta=beta.sigmoid(),
            initial_state=states["rule"] if states is not None else None,
            output_final_state=keep,
            use_qk_l2norm_in_kernel=True,
        )
        if states is not None:
            states.update(conv=conv_state, rule=state)
        return self.out(self.norm(o, self.out_gate(x).unflatten(-1, (self.heads, -1))).flatten(2))


class Model(nn.Module):
    """Two mixers between an embedding and a head."""

    def __init__(self, vocabulary: int, width: int = 64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mixers = nn.ModuleList([Mixer(width, 2, 32) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, states: list[States] | None = None) -> Tensor:
        x = self.embed(ids)
        for i, (mixer, norm) in enumerate(zip(self.mixers, self.norms)):
            x = x + mixer(norm(x), None if states is None else states[i])
        return self.head(self.norms[-1](x))


def recall(batch: int, pairs: int, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw ids [B, 2 P + 1]: P distinct keys with values, then one of the keys; and labels [B], its values."""
    keys = torch.rand(batch, vocabulary // 2, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(vocabulary // 2, vocabulary, (batch, pairs), generator=generator)
    asked = torch.randint(pairs, (batch, 1), generator=generator)
    ids = torch.cat([torch.stack([keys, values], 2).flatten(1), keys.gather(1, asked)], 1)
    return ids, values.gather(1, asked)[:, 0]


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--pairs", type=int, default=8)
    args = parser.parse_args(words)
    torch.manual_seed(0)
    vocabulary, generator = 32, torch.Generator().manual_seed(0)
    model = Model(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(args.steps):
        ids, answer = recall(64, args.pairs, vocabulary, generator)
        loss = cross_entropy(model(ids)[:, -1], answer)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}")

    ids, answer = recall(256, args.pairs, vocabulary, generator)
    with torch.no_grad():
        chunked = model(ids)[:, -1]
        states: list[States] = [{"conv": None, "rule": None} for _ in model.mixers]
        for token in range(ids.shape[1]):
            stepped = model(ids[:, token : token + 1], states)[:, -1]
    result = {
        "accuracy": (chunked.argmax(-1) == answer).float().mean().item(),
        "difference": (chunked - stepped).abs().max().item(),
    }
    print(f"recalled {result['accuracy']:.1%} of {args.pairs} pairs (guessing: {2 / vocabulary:.1%})")
    print(f"token by token the same logits within {result['difference']:.1e}")
    return result


if __name__ == "__main__":
    main()
