"""fla's names of linear attention with a decay per head, or none, against the token loop of GLA."""

import pytest
import torch
from torch import Tensor

from wyfold import UnsupportedError, reference
from wyfold.integrations.fla import linear_attention as fla
from wyfold.reference import error, inputs
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target

F64 = torch.float64
B, T, H, K, V = 2, 40, 3, 8, 16


def drawn(packed: bool = False) -> dict[str, Tensor]:
    """q, k, v and an initial state; packed sequences are one of no token, one of one, and others."""
    a = inputs.draw("random", "gated_delta_rule", Shape(1 if packed else B, T, H, H, K, V), state="normal", dtype=F64,
                    sequences=4 if packed else B)  # fmt: skip
    return {name: a[name] for name in ("q", "k", "v", "g", "initial_state")}


def decays(kind: str, a: dict[str, Tensor]) -> tuple[dict, Tensor | None]:
    """Arguments of a kind of decay, and the gate that they stand for."""
    if kind == "g":
        return {"g": a["g"]}, a["g"]
    if kind == "g_gamma":
        gamma = torch.tensor([-0.5, -0.1, 0.0], dtype=F64)
        return {"g_gamma": gamma}, gamma.expand_as(a["g"])
    return {}, None


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("kind", ["g", "g_gamma", "none"])
def test_simple_gla(kind: str, packed: bool, results, float64_bounds):
    a = drawn(packed)
    own, gate = decays(kind, a)
    given = {name: a[name] for name in ("q", "k", "v", "initial_state")}
    cu = {"cu_seqlens": torch.tensor([0, 17, 17, 18, T])} if packed else {}
    wanted = results(reference.gla, given | {"g": gate}, ["q", "k", "v"], output_final_state=True, **cu)
    for form in (fla.chunk_simple_gla, fla.fused_chunk_simple_gla, fla.fused_recurrent_simple_gla):
        found = results(form, given | own, ["q", "k", "v"], output_final_state=True, **cu)
        for name, x in wanted.items():
            (float64_bounds.gradient if name.startswith("d") else float64_bounds.output)(name, found[name], x)


def test_lightning_and_retention_have_the_decays_of_their_papers(float64_bounds):
    q, k, v, _, state = drawn().values()
    heads = torch.arange(H, dtype=torch.float32)
    lightning = -8 / H * (1 - 2 / 12) * heads
    retention = torch.log1p(-(2.0 ** (-5 - heads)))
    kept = 1 - 2.0 ** (-5 - heads.double())
    error.require(error.judge(retention.exp(), kept, name="decay", target=target("o", torch.float32)))
    for names, further, gamma in (
        (("chunk_lightning_attn", "fused_recurrent_lightning_attn"), (2, 12), lightning),
        (("chunk_retention", "fused_chunk_retention", "fused_recurrent_retention"), (), retention),
    ):
        o, last = reference.gla(q, k, v, gamma.double().expand(B, T, H), initial_state=state, output_final_state=True)
        for name in names:
            found = getattr(fla, name)(q, k, v, *further, initial_state=state, output_final_state=True)
            for of, *pair in zip(("o", "state"), found, (o, last)):
                float64_bounds.output(of, *pair)
    assert torch.equal(fla.parallel_retention(q, k, v)[0], fla.chunk_retention(q, k, v)[0])
    assert torch.equal(fla.parallel_simple_gla(q, k, v)[0], fla.chunk_simple_gla(q, k, v)[0])


def divided(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> Tensor:
    """Normalised linear attention by sums over all pairs; z [B, 1, H, K] is the sum of earlier keys."""
    weights = torch.einsum("bthk,bshk->bhts", q, k).tril() * K**-0.5
    numbers = torch.einsum("bhts,bshv->bthv", weights, v)
    sums = weights.sum(-1).transpose(1, 2) + torch.einsum("bthk,bhk->bth", q, z[:, 0]) * K**-0.5
    return numbers / (sums[..., None] + 1e-10)


FORMS = (fla.chunk_linear_attn, fla.fused_chunk_linear_attn, fla.fused_recurrent_linear_attn)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_normalised_linear_attention(form, float64_bounds):
    """Positive features, as a feature map gives them; in one call, in two, and packed beside an empty sequence."""
    q, k, v = (x.abs() if i < 2 else x for i, x in enumerate([drawn()[name] for name in "qkv"]))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    found, none = form(*leaves, normalize=True)
    assert none[0] is None and none[1].shape == (B, 1, H, K)
    truth = divided(*leaves, torch.zeros(B, 1, H, K, dtype=F64))
    float64_bounds.output("o", found, truth)
    fed = torch.randn_like(truth)
    for name, mine, true in zip("qkv", *(torch.autograd.grad(o, leaves, fed) for o in (found, truth))):
        float64_bounds.gradient(f"d{name}", mine, true)
    first, states = form(*(x[:, :23] for x in (q, k, v)), output_final_state=True, normalize=True)
    float64_bounds.output("z", states[1], k[:, :23].sum(1, keepdim=True))
    second, _ = form(*(x[:, 23:] for x in (q, k, v)), initial_state=states, normalize=True)
    float64_bounds.output("o", torch.cat([first, second], 1), truth)
    rows = [x.flatten(0, 1)[None] for x in (q, k, v)]
    together, (_, sums) = form(*rows, cu_seqlens=torch.tensor([0, T, T, 2 * T]), normalize=True)
    float64_bounds.output("o", together.view_as(truth), truth)
    assert not sums[1].any()


def test_without_normalize_a_state_is_one_tensor(float64_bounds):
    q, k, v, _, state = drawn().values()
    truth = reference.gla(q, k, v, initial_state=state, output_final_state=True, scale=0.3)
    for form in FORMS:
        found = form(q, k, v, scale=0.3, initial_state=state, output_final_state=True, normalize=False)
        for name, *pair in zip(("o", "state"), found, truth):
            float64_bounds.output(name, *pair)
    assert form(q, k, v)[1] is None  # the token form does not normalise by default


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q, **a: fla.chunk_simple_gla(q, **a, g=q[..., 0], g_gamma=q[0, 0, :, 0]), ValueError, "g_gamma must "),
        (lambda q, **a: fla.chunk_simple_gla(q, **a, g=q), ValueError, r"g must have 3 dimensions, \[B, T, HV\]"),
        (lambda q, **a: fla.chunk_simple_gla(q, **a, g_gamma=q[0, 0, :2, 0]), ValueError, r"g_gamma must be \[H\]"),
        (lambda q, **a: fla.fused_recurrent_retention(q, **a, reverse=True), UnsupportedError, "reverse=True"),
        (lambda q, **a: fla.fused_recurrent_linear_attn(q, **a, reverse=True), UnsupportedError, "reverse=True"),
        (lambda q, **a: fla.parallel_retention(q, **a, output_attentions=True), UnsupportedError, "output_attentions"),
        (lambda q, **a: fla.chunk_lightning_attn(q, **a, layer_idx=0, num_layers=0), ValueError, "num_layers must be"),
        (
            lambda q, **a: fla.chunk_linear_attn(q, **a, initial_state=(q, q), normalize=False),
            ValueError,
            "initial_state must be a tensor without normalize, got a pair",
        ),
        (
            lambda q, **a: fla.chunk_linear_attn(q, **a, initial_state=(None, q)),
            ValueError,
            r"initial_state\[1\] must be \[N, 1, H, K\]",
        ),
        (
            lambda **a: fla.chunk_lightning_attn(**a, layer_idx=4, num_layers=3),
            ValueError,
            "^chunk_lightning_attn: layer_idx must be at most 3, got 4",
        ),
        (
            lambda **a: fla.chunk_linear_attn(**a, initial_state=(None, None, None)),
            ValueError,
            "^chunk_linear_attn: initial_state must be a tensor or a pair, got a tuple of 3",
        ),
    ],
)  # fmt: skip
def test_refusals(call, error: type[Exception], message: str):
    a = {name: x for name, x in drawn().items() if name in "qkv"}
    with pytest.raises(error, match=message):
        call(**a)
