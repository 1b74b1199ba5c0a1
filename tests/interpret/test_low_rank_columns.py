"""Rules with two columns and 128 channels a program: on Hopper their `low_rank_prepare` is a kernel in Gluon.

In Triton's interpreter it is Triton's kernel, at a cost that only `make compile` pays.
"""

from itertools import pairwise

import pytest
import torch
from tests.interpret.test_low_rank import BF16, PER_TOKEN, drawn, require_accurate, require_separate_bits
from tests.ops.low_rank_calls import OPERATORS

from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

slow = pytest.mark.release_if_interpreted
WIDTHS = [("chunk_rwkv7", 64), ("chunk_dplr_delta_rule", 128)]


@slow
@pytest.mark.parametrize("gate", ["any", "-1e-3", "-20", "-88", "reset one", "alternating"])
@pytest.mark.parametrize(("name", "K"), WIDTHS)
def test_gates(name: str, K: int, gate: str, device, guarded, results):
    a = drawn(name, Shape(1, 70, 2, 2, K, 64), gate, dtype=BF16)
    require_accurate(name, a, device, guarded, results, chunk_size=32)


@slow
@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize(("name", "K"), [*WIDTHS, ("chunk_rwkv7", 128), ("chunk_iplr_delta_rule", 128)])
def test_chunks_of_other_lengths(name: str, K: int, chunk_size: int, device, guarded, results):
    """They are prepared in Triton on Hopper too. Chunks of 64 tokens once got the kernel for 32."""
    a = drawn(name, Shape(1, 150, 2, 2, K, 64), "weak", dtype=BF16)
    require_accurate(name, a, device, guarded, results, chunk_size=chunk_size)


@slow
def test_gate_inside_and_grouped_heads(device, guarded, results):
    a = drawn("chunk_dplr_delta_rule", Shape(2, 64, 1, 2, 64, 64), "model", dtype=BF16)
    require_accurate("chunk_dplr_delta_rule", a, device, guarded, results, chunk_size=32, scale=0.3)


@slow
@pytest.mark.parametrize("keys", ["identical", "two clusters"])
def test_repeated_keys(keys: str, device, guarded, results):
    a = drawn("chunk_rwkv7", Shape(1, 200, 2, 2, 64, 64), "-1e-3", keys=keys, dtype=BF16)
    require_accurate("chunk_rwkv7", a, device, guarded, results, chunk_size=32)


@slow
@pytest.mark.parametrize(("name", "K"), WIDTHS)
def test_bits(name: str, K: int, device, results):
    """Packed sequences have the bits of separate ones; repeats, strides, kept factors and split calls change none."""
    op, borders = OPERATORS[name][0], [0, 33, 33, 75, 76]
    a = drawn(name, Shape(1, 96, 2, 2, K, 64), sequences=4, dtype=BF16)
    a = {part: x.to(device) if isinstance(x, torch.Tensor) else x for part, x in a.items()}
    a |= {"backend": "triton", "chunk_size": 32}
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    one = a | {"initial_state": a["initial_state"][:1]}
    whole = results(op, one, None, fed | {"state": fed["state"][:1]})
    strided = {
        part: x.transpose(1, 2).contiguous().transpose(1, 2) if part in PER_TOKEN else x for part, x in one.items()
    }
    for other, options in ((strided, {}), (one, {"disable_recompute": True})):
        again = results(op, other, None, fed | {"state": fed["state"][:1]}, **options)
        assert all(torch.equal(again[part], x) for part, x in whole.items())
    outputs, running = [], one["initial_state"]
    for begin, end in pairwise([0, 32, 96]):
        piece = {part: x[:, begin:end] if part in PER_TOKEN else x for part, x in one.items()}
        o, running = op(**piece | {"initial_state": running})
        outputs.append(o)
    assert torch.equal(torch.cat(outputs, 1), whole["o"]) and torch.equal(running, whole["state"])
    for x in (*(a[part] for part in PER_TOKEN if part in a), fed["o"]):
        x[:, 76:] = torch.nan
    cu = torch.tensor(borders, device=device)
    packed, again = (results(op, a, None, fed, cu_seqlens=cu) for _ in range(2))
    assert all(torch.equal(again[part], x) for part, x in packed.items())
    require_separate_bits(results, op, a, fed, packed, borders)
