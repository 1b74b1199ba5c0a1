"""TTT-Linear against a plain implementation of the paper's equations, and open mini-batches between calls."""

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import gelu, layer_norm, linear

from wyfold import SequenceLayout
from wyfold.layers import LayerCache, TTTLinear

WIDTH = 24
FORMS = {
    "mamba": {},
    "transformer": {"conv_size": None, "gated": False},
    "not rotated": {"rope_base": None, "base_step": 2.0, "mini_batch": 32},
}


@pytest.fixture(params=FORMS)
def layer(request: pytest.FixtureRequest) -> TTTLinear:
    """Each published form, with every parameter perturbed at random."""
    layer = TTTLinear(WIDTH, 2, 4, 16, **FORMS[request.param]).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return layer


def filtered(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A causal filter per channel: y[t] = sum_i weight[:, i] x[t - W + 1 + i] + bias.   [T, D]"""
    W = weight.shape[1]
    padded = torch.cat([x.new_zeros(W - 1, x.shape[1]), x])
    return sum(weight[:, i] * padded[i : i + len(x)] for i in range(W)) + bias


def rotated(x: Tensor, m: int, base: float) -> Tensor:
    """Rotate neighbouring channels: complex numbers times exp(i angle).   [T, H, D]"""
    T, _, D = x.shape
    angle = (torch.arange(T) % m)[:, None] * base ** (-torch.arange(0, D, 2).double() / D)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.exp(1j * angle)[:, None]
    return torch.view_as_real(pairs).flatten(-2)


def published(layer: TTTLinear, x: Tensor) -> Tensor:
    """The layer's output for one sequence x [T, hidden_size], with autograd for the inner loss's gradients.

    f(x; W) = x + LN(x W)           loss(W; t) = 1/2 |f(k_t; W) - v_t|^2
    W_t = W_0 - sum over s <= t of eta_ts grad loss(W_0; s)           z_t = f(q_t; W_t)
    eta_ts = max(1 / (1 + index of t in its mini-batch) + delta, 0) * eta_base sigmoid(theta x_s) / D
    """
    T, H, HV, D, m = len(x), layer.num_heads, layer.num_v_heads, layer.head_dim, layer.mini_batch
    projected = linear(x, layer.qkv.weight)
    v = projected[:, -HV * D :].view(T, HV, D)
    if layer.conv is None:
        q, k = projected[:, : H * D], projected[:, H * D : 2 * H * D]
    else:
        halves = zip(layer.conv.weight.chunk(2), layer.conv.bias.chunk(2))
        q, k = (filtered(projected[:, : H * D], weight, bias) for weight, bias in halves)
    q, k = (part.view(T, H, D) for part in (q, k))
    if layer.rope_base is not None:
        q, k = (rotated(part, m, layer.rope_base) for part in (q, k))
    q, k = (part.repeat_interleave(HV // H, dim=1) for part in (q, k))
    by_row = (1 / (torch.arange(m) + 1.0).double() + layer.token_step).clamp(min=0)
    by_column = layer.step_scale * torch.sigmoid(linear(x, layer.step.weight, layer.step.bias))  # [T, HV]

    def f(x: Tensor, W: Tensor, c: Tensor, j: int) -> Tensor:
        return x + layer_norm((x[:, None] @ W + c)[:, 0], (D,), layer.w[j], layer.b[j], layer.eps)

    heads = []
    for j in range(HV):
        W0, c0, rows = layer.start[j], layer.start_bias[j], []
        for begin in range(0, T, m):
            batch = slice(begin, min(begin + m, T))
            n = batch.stop - begin
            W, c = W0.expand(n, D, D), c0.expand(n, 1, D)  # one copy per token, so that each has a gradient
            loss = (f(k[batch, j], W, c, j) - v[batch, j]).square().sum() / 2
            dW, dc = grad(loss, (W, c), create_graph=True)
            steps = (by_row[:n, None] * by_column[None, batch, j]).tril()
            W, c = (s - torch.einsum("ts,sij->tij", steps, d) for s, d in ((W0, dW), (c0, dc)))
            rows.append(f(q[batch, j], W, c, j))
            W0, c0 = W[-1], c[-1]
        heads.append(torch.cat(rows))
    z = layer_norm(torch.cat(heads, dim=-1), (HV * D,), layer.norm.weight, layer.norm.bias, layer.norm.eps)
    if layer.gate is not None:
        z = z * gelu(linear(x, layer.gate.weight), approximate="tanh")
    return linear(z, layer.out.weight)


@pytest.mark.parametrize("lengths", [None, [17, 0, 20, 1]], ids=["dense", "packed"])
def test_output_and_gradients(layer, lengths, float64_bounds, same_gradients):
    x = torch.randn(1 if lengths else 2, 38, WIDTH, dtype=torch.float64, requires_grad=True)
    y = layer(x, layout=SequenceLayout.from_lengths(lengths) if lengths else None)
    sequences = [part for part in x[0].split(lengths) if len(part)] if lengths else x
    truth = torch.cat([published(layer, sequence) for sequence in sequences]).view_as(y)
    float64_bounds.output("y", y, truth)
    same_gradients(layer, x, y, truth)


@pytest.mark.parametrize("first", [1, 15, 16, 17, 33])
def test_an_open_mini_batch_is_continued(layer, first, float64_bounds):
    """The chunk form alone would close it and start a new one, which is a different model."""
    x = torch.randn(2, 70, WIDTH, dtype=torch.float64)
    cache = LayerCache()
    y = torch.cat([layer(x[:, :first], cache=cache), layer(x[:, first:], cache=cache)], dim=1)
    float64_bounds.output("y", y, layer(x))


def test_token_by_token_equals_the_paper(layer, float64_bounds):
    """With a cache whose sequences are at different positions of their mini-batches."""
    x = torch.randn(2, 37, WIDTH, dtype=torch.float64)
    cache = LayerCache()
    with torch.no_grad():
        layer(torch.cat([x[:1, :5], x[1:, :20]], dim=1), layout=SequenceLayout.from_lengths([5, 20]), cache=cache)
        following = torch.stack([x[0, 5:22], x[1, 20:37]])
        y = torch.cat([layer(token, cache=cache) for token in following.split(1, dim=1)], dim=1)
    assert cache["position"].tolist() == [22 % layer.mini_batch, 37 % layer.mini_batch]
    for row, part in ((0, slice(5, 22)), (1, slice(20, 37))):
        float64_bounds.output("y", y[row], published(layer, x[row, : part.stop]).detach()[part])


def test_the_mini_batch_is_part_of_the_model(float64_bounds):
    layers = [TTTLinear(WIDTH, 2, 4, 16, rope_base=None, mini_batch=m).double() for m in (16, 32)]
    weights = layers[0].state_dict() | {"token_step": torch.zeros(32, dtype=torch.float64)}
    layers[1].load_state_dict(weights)
    x = torch.randn(1, 40, WIDTH, dtype=torch.float64)
    sixteen, longer = (layer(x) for layer in layers)
    float64_bounds.output("y", longer[:, :16], sixteen[:, :16])
    assert (longer - sixteen)[:, 16:32].abs().min(1).values.max() > 1e-3


def test_state_dict_names_are_stable():
    parts = {
        "b",
        "conv.bias",
        "conv.weight",
        "gate.weight",
        "norm.bias",
        "norm.weight",
        "out.weight",
        "qkv.weight",
        "start",
        "start_bias",
        "step.bias",
        "step.weight",
        "token_step",
        "w",
    }
    assert set(TTTLinear(16, 1, head_dim=16).state_dict()) == parts
    plain = TTTLinear(16, 1, head_dim=16, conv_size=None, gated=False)
    assert set(plain.state_dict()) == parts - {"conv.bias", "conv.weight", "gate.weight"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 136}, "head_dim must have width K from 1 to 128, got 136"),
        ({"head_dim": 7}, "rope_base must be None with an odd head_dim, got 10000.0 with 7"),
        ({"head_v_dim": torch.ones(2)}, "head_v_dim must be an int, got Tensor"),
        ({"head_v_dim": 8}, "head_v_dim must be None or head_dim = 16, got 8"),
        ({"mini_batch": 8}, "mini_batch must be one of 16, 32, 64, got 8"),
        ({"base_step": float("inf")}, "base_step must be finite, got inf"),
        ({"rope_base": -1.0}, "rope_base must be > 0 or None, got -1.0"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises((TypeError, ValueError), match=f"^TTTLinear: {message}$"):
        TTTLinear(**{"hidden_size": 32, "num_heads": 2, "head_dim": 16} | arguments)


def test_the_gate_is_optional():
    with pytest.raises(TypeError, match=r"^TTTLinear: gated must be True or False, got 1"):
        TTTLinear(32, 2, head_dim=16, gated=1)
