"""PyTorch's checks of the registered operators: schema, fake implementations and tracing agree with execution."""

from typing import Any

import pytest
import torch

import wyfold
from wyfold.autograd import delta as pipeline
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

PACKED = {"cu_seqlens": torch.tensor([0, 7, 7, 30])}
CALLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "deltanet": ("chunk_delta_rule", {}, {}),
    "gdn, packed, states": ("chunk_gated_delta_rule", {}, PACKED | {"return_intermediate_states": True}),
    "gdn, packed, kept factors": ("chunk_gated_delta_rule", {}, PACKED | {"disable_recompute": True}),
    "gdn, kept factors": ("chunk_gated_delta_rule", {"gate": "model"}, {"disable_recompute": True}),
    "kda, all flags": (
        "chunk_kda",
        {"gate": "model bounded", "beta": "logits"},
        PACKED | {"cu_seqlens_cpu": PACKED["cu_seqlens"], "allow_neg_eigval": True, "safe_gate": True},
    ),
    "kda, 16 bits": ("chunk_kda", {"dtype": torch.bfloat16}, {"state_dtype": torch.bfloat16, "chunk_size": 64}),
    "recurrent deltanet": ("fused_recurrent_delta_rule", {}, {}),
    "recurrent gdn": ("fused_recurrent_gated_delta_rule", {"gate": "model"}, {}),
    "recurrent kda, packed": ("fused_recurrent_kda", {"gate": "model"}, PACKED),
    "dplr, packed": ("chunk_dplr_delta_rule", {}, PACKED),
    "gdn2, kept factors": ("chunk_gdn2", {"gate": "model"}, {"disable_recompute": True}),
    "recurrent comba, 16 bits": ("fused_recurrent_comba", {"dtype": torch.bfloat16}, {}),
}  # fmt: skip


@pytest.fixture
def recorded(monkeypatch) -> dict[str, tuple]:
    """The last call of each direction's operator: operator and arguments."""
    seen = {}
    for name in ("_forward_op", "_backward_op"):
        op = getattr(pipeline, name)

        def record(*arguments: Any, name: str = name, op: Any = op):
            seen[name] = (op, arguments)
            return op(*arguments)

        monkeypatch.setattr(pipeline, name, record)
    return seen


VARIANTS = "gdn, packed, states", "gdn, kept factors", "kda, 16 bits", "recurrent deltanet", "recurrent gdn"
"""Calls whose options other calls have too."""


@pytest.mark.parametrize(
    "name, final",
    [
        *(
            pytest.param(name, n % 2 == 0, marks=[pytest.mark.release] if name in VARIANTS else [])
            for n, name in enumerate(CALLS)
        ),
        ("deltanet", False),
    ],
)
def test_both_directions(name: str, final: bool, recorded, results):
    op, drawn, options = CALLS[name]
    rule = op.removeprefix("chunk_").removeprefix("fused_recurrent_")
    shape = Shape(1 if "cu_seqlens" in options else 2, 33, 1, 2, 8, 16)
    state = "normal" if final else "none"
    N = options["cu_seqlens"].shape[0] - 1 if "cu_seqlens" in options else None
    a = inputs.draw("random", rule, shape, state=state, sequences=N, **drawn)
    wrt = None if final else ["q", "v"]
    results(getattr(wyfold, op), a, wrt, output_final_state=final, **options)
    assert set(recorded) == {"_forward_op", "_backward_op"}
    for operator, arguments in recorded.values():
        # Without requires_grad, because the operators have no gradient. The autograd function has it.
        plain = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
        torch.library.opcheck(operator, plain)


@pytest.mark.parametrize("name", CALLS)
def test_meta_tensors_give_shapes_and_dtypes(name: str, results):
    op, drawn, options = CALLS[name]
    rule = op.removeprefix("chunk_").removeprefix("fused_recurrent_")
    shape = Shape(1 if "cu_seqlens" in options else 2, 33, 1, 2, 8, 16)
    a = inputs.draw("random", rule, shape, **drawn) | options | {"output_final_state": True}
    real = results(getattr(wyfold, op), a)
    meta = {key: x.to("meta") if isinstance(x, torch.Tensor) and key != "cu_seqlens_cpu" else x for key, x in a.items()}
    fake = results(getattr(wyfold, op), meta, [key.removeprefix("d") for key in real if key.startswith("d")], {
        "o": torch.empty_like(real["o"], device="meta"), "state": torch.empty_like(real["state"], device="meta"),
    })  # fmt: skip
    for key, x in real.items():
        assert fake[key].device.type == "meta"
        assert (fake[key].shape, fake[key].dtype) == (x.shape, x.dtype), key
