"""Runs the promises of tools/proofs/serving.py at small sizes on this machine, without CUDA graphs and timings."""

import time

import pytest
import torch
from tools.proofs.serving import OF_A_CARD, WANTED, parts, run_part

LINES = tuple(line for line in WANTED if line not in OF_A_CARD)


@pytest.mark.parametrize("name", ["kda/KV/16", "conv", "ttt", "decoder", "gates:kda"])
def test_every_promise_is_tried_and_held(name: str):
    found = run_part(parts(torch.device("cpu"), None)[name], LINES, None, time.time() + 600)
    tried = [line for line in found["lines"].values() if line["planned"]]
    assert found["ended"] and tried
    assert all(line["held"] == line["planned"] and not line["broken"] for line in tried), found
