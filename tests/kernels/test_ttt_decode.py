"""`ttt_decode` token by token equals the token loop, and a closed mini-batch leaves the loop's state."""

import pytest
import torch

from wyfold.kernels import table
from wyfold.kernels.records import Slots
from wyfold.kernels.ttt_decode import Pools
from wyfold.kernels.ttt_records import TTTInputs
from wyfold.reference import inputs
from wyfold.reference.error import judge, require
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target
from wyfold.reference.ttt import ttt_linear

C, EPS, SCALE = 16, 1e-6, 0.4


@pytest.mark.parametrize("D", [7, 32, 60])
def test_a_mini_batch_and_what_follows(D: int, backend: str, device: torch.device):
    """Two sequences in slots 2 and 0, decoded for one mini-batch and two more tokens."""
    N, T, H, HV = 2, C + 2, 1, 2
    a = inputs.draw(rule="ttt_linear", shape=Shape(N, T, H, HV, D, D), state="normal", eta_col="signed", seed=1)
    wide = {name: x.double() for name, x in a.items()}
    o, _, _ = ttt_linear(**wide, scale=SCALE, eps=EPS, chunk_size=C)
    first = {name: x[:, :C] if x.ndim == 4 and "state" not in name else x for name, x in wide.items()}
    _, S, c = ttt_linear(**first, scale=SCALE, eps=EPS, chunk_size=C, output_final_state=True)

    source = torch.tensor([[2], [0]])
    pools = Pools(
        *(torch.full((3, HV, rows, D), torch.nan) for rows in (D, 1)),
        *(torch.zeros(3, HV, rows, D) for rows in (D, 1)),
        torch.zeros(3, dtype=torch.int64),
    )
    pools.S[source[:, 0]], pools.c[source[:, 0]] = a["initial_state"], a["initial_state_bias"]
    pools, found = Pools(*(x.to(device) for x in pools)), []
    b = {name: x.to(device) for name, x in a.items()}
    for t in range(T):
        q, k, v, eta, col = (b[name][:, t : t + 1] for name in ("q", "k", "v", "eta", "eta_col"))
        y = torch.empty(N, 1, HV, D, device=device)
        tokens = TTTInputs(q, k, v, b["w"], b["b"], eta, col, "o")
        table.kernel_module("ttt_decode", backend).ttt_decode(
            tokens, pools, Slots(None, None, source.to(device)), C, SCALE, EPS, y
        )
        found.append(y.cpu())
    left = {"o": (torch.cat(found, 1), o)}
    for name, pool, x in (("state", pools.S, S), ("state_bias", pools.c, c)):
        left[name] = pool.cpu()[source[:, 0]], x
    require(*(judge(x, truth, name=name, target=target(name, torch.float32)) for name, (x, truth) in left.items()))
    assert pools.position.tolist() == [2, 0, 2] and pools.S[1].isnan().all() and not pools.G[1].any()
