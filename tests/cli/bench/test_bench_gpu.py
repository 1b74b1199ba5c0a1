"""`bench` on a GPU."""

import json
from collections.abc import Iterator

import pytest
import torch

from wyfold.cli import main
from wyfold.cli.bench import suites, timing
from wyfold.cli.bench.suites import SuiteRow
from wyfold.reference.shapes import Shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")


@pytest.fixture(autouse=True)
def as_users_run_it() -> Iterator[None]:
    """Disable the suite's poisoned memory and deterministic algorithms, which launch extra kernels."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


def test_a_run_on_a_gpu_times_calls_graphs_and_kernels(tmp_path):
    words = "bench gdn l2norm --shapes 1,300,4,64 --mode fwd,fwdbwd,graph --rounds 2 --peers none --backend eager --out"
    assert main([*words.split(), str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert record["copy_bytes_per_second"] > 1e10
    assert len(record["rows"]) == 4
    for row in record["rows"]:
        assert row["correct"], row
        assert row["milliseconds"]["rounds"] == 2 * timing.BURST
        assert row["kernels"]
        assert row["kernel_milliseconds"] > 0
        assert row["peak"]["above_inputs_mib"] > 0
        assert row["graph_milliseconds"] or row["graph_refused"]  # the eager backend may synchronise with the device


def test_a_flush_is_not_counted_as_a_kernel_and_a_copy_is():
    gpu = timing.Gpu()
    source, target = torch.ones(2**22, device="cuda"), torch.empty(2**22, device="cuda")
    (kernel,) = gpu.kernels(lambda: target.copy_(source))
    assert kernel.count == 1
    (fill,) = gpu.kernels(lambda: target.fill_(2.0))
    assert fill.name not in gpu.flushing
    assert gpu.peak_mib(lambda: torch.empty(2**20, dtype=torch.float32, device="cuda")) == 4.0


def test_the_current_gpu_is_the_one_that_is_described():
    name = torch.cuda.get_device_name()
    assert timing.card().get("name", name) == name


def test_kernels_of_a_suite_compile_in_processes_before_it_is_timed(tmp_path, monkeypatch):
    rows = (
        SuiteRow("gdn", Shape(1, 300, 2, 4, 64, 64)),
        # Forward: the gradients of its gate are two numbers, and their limit the error that two others happen to have.
        SuiteRow("gdn_layer", Shape(1, 300, 2, 2, 64, 64), gate="model", modes=suites.FORWARD),
    )
    monkeypatch.setitem(suites.SUITES, "groups", rows)
    words = "bench --suite groups --rounds 2 --peers none --compile 2 --budget 300 --out"
    assert main([*words.split(), str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    calls = [(row["op"], row["mode"]) for row in record["rows"]]
    assert calls == [("gdn", "fwd"), ("gdn", "fwdbwd"), ("gdn_layer", "fwd")]
    for row in record["rows"]:
        assert row["correct"] and row["graph_milliseconds"], (row["refused"], row["errors"], row["graph_refused"])
        assert any("wyfold_" in kernel["name"] for kernel in row["kernels"])


def test_a_synchronising_call_cannot_be_captured_and_leaves_state_intact():
    gpu, x = timing.Gpu(), torch.ones(1000, device="cuda")
    home = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        gpu.captured(lambda: x.sum().item())
    assert torch.cuda.current_stream() == home
    assert x.sum().item() == 1000


def test_a_graph_repeats_a_call():
    x = torch.ones(1000, device="cuda")
    replay = timing.Gpu().captured(lambda: x.mul_(2.0))
    before = x.clone()
    replay()
    assert torch.equal(x, 2 * before)
