"""Exported programs and traces of operators and models.

`torch.export` does not support autograd functions: a program of any mixer failed with gradients enabled ("functions
with out=... don't support automatic differentiation"). A program exported by Dynamo ran, but every gradient lacked the
operator's contribution.
"""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize
from torch.utils._pytree import tree_leaves

import wyfold
from wyfold import SequenceLayout, layers, serving
from wyfold.models import Decoder, DecoderConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

B, T, H, K = 1, 20, 2, 8
MIXERS = {
    "delta_net": lambda: layers.DeltaNet(16, H, head_dim=K),
    "gdn": lambda: layers.GatedDeltaNet(16, H, head_dim=K),
    "kda": lambda: layers.KimiDeltaAttention(16, H, head_dim=K),
    "ttt_linear": lambda: layers.TTTLinear(16, H, head_dim=K),
    "rwkv7": lambda: layers.RWKV7TimeMix(16, H, head_dim=K),
    "path_attention": lambda: layers.PaTHAttention(16, H, head_dim=K, use_forget_gate=True),
    "attention": lambda: layers.SoftmaxAttention(16, H, head_dim=K),
    "window": lambda: layers.SoftmaxAttention(16, H, head_dim=K, window=5),
}


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *given):
        return self.function(*given)


def drawn() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, T, H, K).double()
    return {
        "q": q,
        "k": normalize(k, dim=-1),
        "v": v,
        "beta": torch.rand(B, T, H).double(),
        "g": -torch.rand(B, T, H).double(),
        "channels": -torch.rand(B, T, H, K).double(),
        "x": torch.randn(B, T, 16).double(),
        "weight": torch.randn(16, 4).double(),
        "row": torch.ones(16).double(),
        "w": torch.ones(H, K).double(),
        "b": torch.zeros(H, K).double(),
        "eta": 0.1 * torch.rand(B, T, H).double(),
        "A_log": torch.randn(H).double(),
        "dt_bias": torch.randn(H).double(),
    }


OPERATORS = {
    "chunk_delta_rule": ("q k v beta", lambda *t: wyfold.chunk_delta_rule(*t)[0]),
    "fused_recurrent_delta_rule": ("q k v beta", lambda *t: wyfold.fused_recurrent_delta_rule(*t)[0]),
    "chunk_gated_delta_rule": (
        "q k v g beta",
        lambda *t: wyfold.chunk_gated_delta_rule(*t, output_final_state=True),
    ),
    "one tensor twice": ("k v g beta", lambda k, *t: wyfold.chunk_gated_delta_rule(k, k, *t)[0]),
    "packed": (
        "q k v g beta",
        lambda *t: wyfold.chunk_gdn(*t, cu_seqlens=SequenceLayout(torch.tensor([0, 7, 20]), T))[0],
    ),
    "chunk_kda": ("q k v channels beta", lambda *t: wyfold.chunk_kda(*t)[0]),
    "chunk_ttt_linear": ("q k v w b eta", lambda *t: wyfold.chunk_ttt_linear(*t)[0]),
    "fused_recurrent_ttt_linear": ("q k v w b eta", lambda *t: wyfold.fused_recurrent_ttt_linear(*t)[0]),
    "parallel_path_attn": ("q k v k beta g", lambda *t: wyfold.parallel_path_attn(*t, use_cache=True)),
    "causal_conv1d": ("x weight", lambda *t: wyfold.causal_conv1d(*t)[0]),
    "l2norm": ("x", lambda *t: wyfold.l2norm(*t)),
    "rms_norm_gated": ("x x row", lambda *t: wyfold.rms_norm_gated(*t)),
    "fused_gdn_gate": ("g A_log dt_bias", lambda *t: wyfold.fused_gdn_gate(*t)),
    "fused_beta_sigmoid": ("x", lambda *t: wyfold.fused_beta_sigmoid(*t)),
}

SHOWN = "gdn", "rwkv7"
"""Mixers that Dynamo traces in `make test`, which compiles the others elsewhere."""

STRICTLY = ("fused_recurrent_delta_rule", "one tensor twice", "packed", "chunk_kda", "chunk_ttt_linear", "l2norm")
"""Operators that Dynamo traces as well. All others go through it inside of mixers."""


def results(run, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs, and gradients of every given tensor."""
    given = [x.clone().requires_grad_() for x in tensors]
    outputs = tree_leaves(run(*given))
    sum(y.square().sum() for y in outputs).backward()
    return [*(y.detach() for y in outputs), *(x.grad for x in given)]


def same(found: list[torch.Tensor], truth: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize(
    ("operator", "strict"),
    [*((name, False) for name in OPERATORS), *((name, True) for name in STRICTLY)],
    ids=lambda x: x if isinstance(x, str) else ("traced", "strict")[x],
)
def test_an_exported_operator_has_its_gradients(operator, strict):
    names, run = OPERATORS[operator]
    tensors = [drawn()[name] for name in names.split()]
    program = torch.export.export(Call(run), tuple(tensors), strict=strict).module()
    assert same(results(program, tensors), results(run, tensors))
    with torch.no_grad():
        assert same(tree_leaves(program(*tensors)), tree_leaves(run(*tensors)))


def learned(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    module(x).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "strict"),
    [
        *(pytest.param(name, False, id=f"{name}-traced") for name in MIXERS),
        *(
            pytest.param(name, True, id=f"{name}-strict", marks=[] if name in SHOWN else pytest.mark.release)
            for name in MIXERS
        ),
    ],
)
def test_an_exported_mixer_computes_and_learns(name, strict):
    """With gradients enabled and, of one mixer, disabled, independent of the setting at export."""
    layer, x = MIXERS[name]().double(), drawn()["x"]
    for learning in (True, False) if name == "gdn" and not strict else (True,):
        with torch.set_grad_enabled(learning):
            program = torch.export.export(layer, (x,), strict=strict).module()
        with torch.no_grad():
            assert torch.equal(program(x), layer(x))
        found, truth = learned(program, x), learned(layer, x)
        assert found.keys() == truth.keys() and all(torch.equal(found[n], truth[n]) for n in truth)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recompute", "strict"),
    [pytest.param(None, True, marks=pytest.mark.release), ("blocks", True), ("selective", False)],
)
def test_an_exported_decoder_computes_and_learns(recompute, strict):
    """With a layout among its inputs."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 2, "head_dim": 8, "num_layers": 2}
    model = Decoder(DecoderConfig(pattern="gdn attention", **sizes)).double()
    model.recompute(recompute)
    ids, layout = torch.randint(256, (1, T)), SequenceLayout.from_lengths([8, 12])
    program = torch.export.export(model, (ids, ids), {"layout": layout}, strict=strict).module()
    (logits, loss), (truth, true_loss) = program(ids, ids, layout=layout), model(ids, ids, layout=layout)
    assert torch.equal(logits, truth) and torch.equal(loss, true_loss)
    loss.backward()
    true_loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(program.get_parameter(name).grad, parameter.grad), name


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_operators_without_gradient_raise_in_a_program(strict):
    given = drawn()
    tokens = [given[name][:, :1].float() for name in ("q", "k", "v", "g", "beta")]
    pool = torch.randn(1, H, K, K)

    def step(q, k, v, g, beta, pool):
        return serving.decode(q, k, v, g, beta, pool=pool, state_v_first=True)

    program = torch.export.export(Call(step), (*tokens, pool.clone()), strict=strict).module()
    ours, theirs = pool.clone(), pool.clone()
    assert torch.equal(program(*tokens, ours), step(*tokens, theirs)) and torch.equal(ours, theirs)
    with pytest.raises(
        RuntimeError, match=r"wyfold::serve has no gradient, and one of its arguments requires one; call"
    ):
        program(tokens[0].requires_grad_(), *tokens[1:], ours)
    assert torch.equal(ours, theirs)
    factors = torch.export.export(
        Call(lambda k, beta: wyfold.chunk_scaled_dot_kkt(k, beta)), (given["k"], given["beta"]), strict=strict
    ).module()
    with pytest.raises(RuntimeError, match=r"wyfold::chunk_scaled_dot_kkt has no gradient, and one of its arguments"):
        factors(given["k"].requires_grad_(), given["beta"])


# A warning of PyTorch 2.11 about the file that it reads.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_a_saved_program_gives_the_same_results(tmp_path):
    layer, x = MIXERS["gdn"]().double(), drawn()["x"]
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "mixer.pt2")
    program = torch.export.load(tmp_path / "mixer.pt2").module()
    found, truth = learned(program, x), learned(layer, x)
    assert all(torch.equal(found[name], truth[name]) for name in truth)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in MIXERS if name != "window"])
def test_a_trace_computes_and_learns(name):
    """`torch.jit.trace`, also at another length than that of its example."""
    layer, x = MIXERS[name]().double(), drawn()["x"]
    traced = torch.jit.trace(copy.deepcopy(layer), x)
    for given in (x, torch.randn(1, 33, 16).double()):
        assert torch.equal(traced(given), layer(given))
    found, truth = learned(traced, x), learned(layer, x)
    assert all(torch.equal(found[name], truth[name]) for name in truth)


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
def test_a_window_is_not_traced():
    layer = MIXERS["window"]()
    with pytest.raises(
        ValueError, match=r"^SoftmaxAttention: window must be None under torch.jit.trace, which would fix"
    ):
        torch.jit.trace(layer, torch.randn(1, 4, 16))


def test_is_exporting_is_not_called_under_torch_2_11():
    """In its compiler `torch.compiler.is_exporting()` is true, and compiled operators lost their gradients."""
    sources = Path(wyfold.__file__).parent.rglob("*.py")
    assert [file.name for file in sources if "compiler.is_exporting(" in file.read_text(encoding="utf-8")] == []
