"""A `SequenceLayout` in a batch stayed on the CPU. Data loaders and hooks move objects with a method `to`, and pin
those with `pin_memory`.
"""

import copy
import pickle

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from wyfold import SequenceLayout


def layouts():
    lengths = SequenceLayout.from_lengths([3, 0, 4], tokens=9)
    return [lengths, SequenceLayout.from_mask(torch.tensor([[1, 1, 0], [0, 1, 1]]))]


@pytest.mark.parametrize("number", range(2))
def test_a_layout_moves_with_its_batch(number):
    from accelerate.utils import send_to_device

    layout = layouts()[number]
    moved = send_to_device({"ids": torch.zeros(1, 9), "layout": layout}, "meta")["layout"]
    assert type(moved) is type(layout) and moved.device.type == "meta" and moved.tokens == layout.tokens
    assert moved.longest == layout.longest and moved.max_seqs == layout.max_seqs
    assert layout.device.type == "cpu"
    if number == 1:
        assert moved.mask.device.type == "meta"
    assert layout.to("cpu") is layout and layout.to(torch.device("cpu"), non_blocking=True) is layout
    with pytest.raises(TypeError, match=r"^SequenceLayout.to: device must be a device, got torch.float32; boundaries"):
        layout.to(torch.float32)


@pytest.mark.parametrize("number", range(2))
def test_a_layout_is_pinned_with_its_batch(number, monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x, *device: pinned.append(x) or x.clone())
    layout = layouts()[number]
    found = pin_memory((torch.zeros(1), layout))[1]
    assert type(found) is type(layout) and found is not layout
    assert len(pinned) == 2 + number  # the batch's tensor, the boundaries, and the mask
    assert torch.equal(found.cu_seqlens, layout.cu_seqlens) and found.longest == layout.longest


def test_a_layout_travels_from_a_worker():
    for layout in layouts():
        for other in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
            assert torch.equal(other.to("cpu").cu_seqlens, layout.cu_seqlens) and other.longest == layout.longest
