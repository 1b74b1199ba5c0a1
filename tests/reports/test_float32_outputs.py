"""`out=` in float32 was refused.

A float32 state may have a readout above 65,504, which becomes inf in float16.
"""

from typing import Any

import pytest
import torch

from wyfold import TTTState, serving

LARGE = 2.0**20  # exact in bfloat16


def token(rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """Arguments whose output is read from a state of `LARGE`, with a write strength of zero."""
    x = torch.zeros(rows, columns, 1, 16, dtype=dtype, device=device)
    x[..., 0] = 1
    return {"q": x, "k": x, "v": x, "g": None, "beta": torch.zeros(rows, columns, 1, device=device), "scale": 1.0}


def call(name: str, out: torch.Tensor | None, device: torch.device, backend: str, dtype: torch.dtype = torch.float16):
    pool = torch.full((2, 1, 16, 16), LARGE, device=device)
    slots = torch.tensor([1, 0], device=device)
    common = {"state_v_first": False, "backend": backend, "out": out}
    if name == "verify":
        slots = torch.tensor([[1], [0]], device=device)
        accepted = torch.ones(2, dtype=torch.int32, device=device)
        return serving.verify(
            **token(2, 1, device, dtype), pool=pool, state_indices=slots, num_accepted_tokens=accepted, **common
        )
    if name == "decode_packed":
        row = torch.cat([x.flatten(1) for x in list(token(2, 1, device, dtype).values())[:3]], 1)
        raw = torch.full((2, 1), -1e4, device=device)  # a gate of one, a write strength of zero
        return serving.decode_packed(
            row, raw, raw, None, None, pool, slots, heads=(1, 1), dims=(16, 16), scale=1.0, **common
        )
    T = {"decode": 1, "prefill": 20}[name]
    return getattr(serving, name)(**token(2, T, device, dtype), pool=pool, state_indices=slots, **common)


SHAPES = {"decode": (2, 1, 1, 16), "verify": (2, 1, 1, 16), "decode_packed": (2, 1, 16), "prefill": (2, 20, 1, 16)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_a_readout_beyond_float16(name: str, dtype: torch.dtype, device, backend: str):
    out = torch.full(SHAPES[name], torch.nan, device=device)
    assert call(name, out, device, backend, dtype) is out
    assert (out - LARGE).abs().max() <= (1 if name == "decode_packed" else 0)  # normalises q with an eps
    narrow = call(name, None, device, backend, dtype)
    assert narrow.dtype == dtype and torch.equal(out.to(dtype), narrow)


def test_other_dtypes_of_out_are_still_refused(device, backend: str):
    for dtype, out in ((torch.float16, torch.bfloat16), (torch.float16, torch.float64), (torch.float32, torch.float16)):
        with pytest.raises(ValueError, match=r"^decode: out must have the dtype of v, "):
            call("decode", torch.empty(SHAPES["decode"], dtype=out, device=device), device, backend, dtype)


def test_ttt_decode(device, backend: str):
    q, k, v = torch.randn(3, 2, 1, 1, 16, dtype=torch.float16, device=device)
    w, b = torch.ones(1, 16, device=device), torch.zeros(1, 16, device=device)
    found = []
    for out in (None, torch.empty(2, 1, 1, 16, device=device)):
        S, c = torch.zeros(2, 1, 16, 16, device=device), torch.zeros(2, 1, 1, 16, device=device)
        pool = TTTState(S, c, S.clone(), c.clone(), torch.zeros(2, dtype=torch.int32, device=device))
        found.append(serving.ttt_decode(q, k, v, w, b, 0.1, pool, out=out, backend=backend))
    assert found[1].dtype == torch.float32 and torch.equal(found[1].half(), found[0])
