"""PaTH attention layer: its formula, its cache across many tokens, and fla's parameters."""

import pytest
import torch
from torch.nn import functional as F

from wyfold import SequenceLayout, reference
from wyfold.kernels.path_records import CHUNK
from wyfold.layers import LayerCache, PaTHAttention
from wyfold.reference import error

WIDTH = 24


def perturbed(**options) -> PaTHAttention:
    layer = PaTHAttention(WIDTH, 4, 2, 8, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return layer


def formula(layer: PaTHAttention, x: torch.Tensor, layout: SequenceLayout | None = None) -> torch.Tensor:
    p = dict(layer.named_parameters())
    w = x @ p["w_proj.0.weight"].T @ p["w_proj.1.weight"].T if "w_proj.0.weight" in p else x @ p["w_proj.weight"].T
    if "w_conv1d.weight" in p:
        bias = p.get("w_conv1d.bias")
        w, _ = reference.causal_conv1d(w, p["w_conv1d.weight"], bias, activation="silu", cu_seqlens=layout)
    q, k, v = (x @ p[f"{name}_proj.weight"].T for name in "qkv")
    q, k, v, w = (rows.unflatten(-1, (-1, 8)) for rows in (q, k, v, w))
    if "maybe_q_norm.weight" in p:
        q, k = (F.rms_norm(rows, (8,), p[f"maybe_{name}_norm.weight"], 1e-5) for rows, name in ((q, "q"), (k, "k")))
    w = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    beta = 2 * torch.sigmoid(x @ p["bt_proj.weight"].T + p["bt_proj.bias"])
    g = F.logsigmoid(x @ p["g_proj.weight"].T + p["g_proj.bias"]) if "g_proj.weight" in p else None
    o, _ = reference.path_attention(q, k, v, w, beta, g, gate_scaled=layer.gate_scaled, cu_seqlens=layout)
    return o.flatten(2) @ p["o_proj.weight"].T


OPTIONS = {
    "as published": {},
    "forget gate": {"use_forget_gate": True},
    "paper's gate, norms": {"use_forget_gate": True, "gate_scaled": False, "use_qk_norm": True},
    "plain w": {"use_low_rank_w": False, "use_w_shortconv": False},
    "biased filter": {"conv_bias": True, "conv_size": 4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_output_and_gradients(options, float64_bounds, same_gradients):
    layer = perturbed(**options)
    x = torch.randn(2, 21, WIDTH, dtype=torch.float64, requires_grad=True)
    y, truth = layer(x), formula(layer, x)
    float64_bounds.output("y", y, truth)
    same_gradients(layer, x, y, truth)
    layout = SequenceLayout.from_lengths([9, 0, 12])
    float64_bounds.output("y", layer(x[:1], layout=layout), formula(layer, x[:1], layout))


@pytest.mark.parametrize("gated", [pytest.param(False, marks=pytest.mark.release), True])
@pytest.mark.parametrize("prompt", [0, pytest.param(1, marks=pytest.mark.release), CHUNK, 2 * CHUNK + 3])
def test_decoding_across_chunks(prompt: int, gated: bool, float64_bounds):
    """Keys are brought forward once in a chunk, also behind a call of several tokens."""
    layer = perturbed(use_forget_gate=gated)
    T = prompt + CHUNK + 10
    x = torch.randn(2, T, WIDTH, dtype=torch.float64)
    cache, rewritten, before = LayerCache(), 0, None
    with torch.no_grad():
        outputs = [layer(x[:, :prompt], cache=cache)]
        for t in [*range(prompt, T - 5), slice(T - 5, T)]:
            outputs.append(layer(x[:, t : t + 1] if isinstance(t, int) else x[:, t], cache=cache))
            assert cache["keys"].shape[1] == cache["values"].shape[1] == cache["counts"][0]
            rewritten += before is not None and not torch.equal(cache["keys"][:, : before.shape[1]], before)
            before = cache["keys"]
        float64_bounds.output("y", torch.cat(outputs, 1), layer(x))
    assert rewritten == 1


def test_a_packed_call_without_tokens_of_a_sequence_keeps_its_keys(float64_bounds):
    layer = perturbed(use_forget_gate=True)
    x = torch.randn(3, 40, WIDTH, dtype=torch.float64)
    cache, lengths = LayerCache(), [[20, 7, 0], [0, 3, 1], [5, 0, 0], [1, 0, 4]]
    at, outputs = [0, 0, 0], [[], [], []]
    with torch.no_grad():
        for step in lengths:
            tokens = torch.cat([x[n : n + 1, at[n] : at[n] + step[n]] for n in range(3)], 1)
            y = layer(tokens, layout=SequenceLayout.from_lengths(step, tokens=sum(step)), cache=cache)
            for n, part in enumerate(y.split(step, dim=1)):
                outputs[n].append(part)
                at[n] += step[n]
        last = layer(torch.stack([x[n, at[n] : at[n] + 1] for n in range(3)]), cache=cache)
        for n in range(3):
            got = torch.cat([*outputs[n], last[n : n + 1]], 1)
            float64_bounds.output(f"sequence {n}", got, layer(x[n : n + 1, : at[n] + 1]))


def test_16_bit_keys_are_rounded_once_in_a_chunk():
    """Decoding from bfloat16 keys is as accurate as one call."""
    layer = perturbed(use_forget_gate=True).bfloat16()
    x = torch.randn(1, 200, WIDTH).bfloat16()
    with torch.no_grad():
        one = layer(x)
        cache = LayerCache()
        decoded = torch.cat([layer(x[:, :30], cache=cache), *(layer(t, cache=cache) for t in x[:, 30:].split(1, 1))], 1)
        truth = layer.double()(x.double())
    error.require(error.judge(decoded, truth, one, name="y"))


def test_flas_parameters_load():
    """Names and shapes as in fla's layer, whose filter is that of a Conv1d."""
    layer = PaTHAttention(WIDTH, 3, use_forget_gate=True, use_qk_norm=True, conv_bias=True)
    expected = {
        "q_proj.weight": (24, 24), "k_proj.weight": (24, 24), "v_proj.weight": (24, 24), "o_proj.weight": (24, 24),
        "w_proj.0.weight": (32, 24), "w_proj.1.weight": (24, 32), "w_conv1d.weight": (24, 3), "w_conv1d.bias": (24,),
        "bt_proj.weight": (3, 24), "bt_proj.bias": (3,), "g_proj.weight": (3, 24), "g_proj.bias": (3,),
        "maybe_q_norm.weight": (8,), "maybe_k_norm.weight": (8,),
    }  # fmt: skip
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == expected
    theirs = {name: torch.randn_like(x) for name, x in layer.state_dict().items()}
    filters = theirs["w_conv1d.weight"]
    theirs["w_conv1d.weight"] = filters[:, None]
    torch.nn.Sequential(layer).load_state_dict({f"0.{name}": x for name, x in theirs.items()})
    assert torch.equal(layer.w_conv1d.weight, filters) and theirs["w_conv1d.weight"].ndim == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads = 4, got 3"),
        ({"hidden_size": 30}, "num_heads must divide hidden_size = 30 if head_dim is None, got 4"),
        ({"head_dim": 12}, "head_dim must have width K a multiple of 8 from 8 to 128, got 12"),
        ({"head_dim": 136}, "head_dim must have width K a multiple of 8 from 8 to 128, got 136"),
        ({"use_qk_norm": 1}, "use_qk_norm must be True or False, got 1"),
        ({"backend": "cuda"}, "backend must be one of None, 'eager', .*, got 'cuda'"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises((ValueError, TypeError), match=f"^PaTHAttention: {message}$"):
        PaTHAttention(**{"hidden_size": 32, "num_heads": 4} | arguments)


def test_normed_queries_and_keys_under_autocast():
    layer, x = PaTHAttention(32, 2, use_qk_norm=True), torch.randn(1, 5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)  # a warning would be an error
    assert y.dtype == torch.bfloat16 and y.isfinite().all()
