"""The past never depends on the future, bit for bit: outputs up to t, and gradients of a loss on them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wyfold
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

RULES = (
    pytest.param("delta_rule", marks=pytest.mark.release),
    "gated_delta_rule",
    "kda",
)  # no gate is a scalar gate left out
FORMS = ("chunk 16", "chunk 64", "fused_recurrent")
PER_TOKEN = ("q", "k", "v", "g", "beta")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
@given(
    st.integers(2, 90), st.data(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.sampled_from(["weak", "any", "spiky", "model"]), st.sampled_from([(1, 1), (2, 4)]),
)  # fmt: skip
def test_nothing_after_t_reaches_t(results, rule: str, form: str, T: int, data, dtype: torch.dtype, gate: str, heads):
    t = data.draw(st.integers(1, T - 1))
    form, _, size = form.partition(" ")
    op, options = getattr(wyfold, f"{form}_{rule}"), {"chunk_size": int(size)} if size else {}
    a = inputs.draw("random", rule, Shape(1, T, *heads, 16, 8), gate=gate, state="normal", dtype=dtype, seed=T)
    other = inputs.draw(
        "random", rule, Shape(1, T, *heads, 16, 8), gate=gate, keys="positive", beta="one", dtype=dtype, seed=t
    )
    fed = {"o": inputs.incoming(a["v"], 1)}
    fed["o"][:, t:] = 0  # a loss on the first t tokens
    truth = results(op, a, None, fed, **options)
    chosen = data.draw(st.sets(st.sampled_from([name for name in PER_TOKEN if name in a]), min_size=1))
    future = a | {name: torch.cat([a[name][:, :t], other[name][:, t:]], 1) for name in chosen}
    got = results(op, future, None, fed, **options)
    for name, x in truth.items():
        if name in ("dA_log", "ddt_bias"):  # sums over all tokens, whose later terms are exact zeros
            assert torch.equal(got[name], x), name
        else:
            past = slice(None) if name == "dinitial_state" else slice(0, t)
            assert torch.equal(got[name][:, past], x[:, past]), (name, chosen)
    for name in PER_TOKEN:
        if name in a:
            assert not got[f"d{name}"][:, t:].any(), name
    # The same bits without any later tokens.
    prefix = {name: x[:, :t] if name in PER_TOKEN else x for name, x in a.items()}
    assert torch.equal(results(op, prefix, (), **options)["o"], truth["o"][:, :t])
