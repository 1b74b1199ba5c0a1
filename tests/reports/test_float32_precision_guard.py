"""float32 products inside operators are protected from TF32 and bfloat16 by a process-wide setting.

After a fork while another thread was inside a call, the child's calls were no longer protected. The end of a call
overwrote a setting that another thread had changed meanwhile.
"""

import os
import select
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from wyfold.runtime.torch_ops import _isolated

products = torch.backends.mkldnn.matmul
seen: list[str] = []
"""The setting inside each call of `record_setting`."""
started, finish = threading.Event(), threading.Event()


def record_setting(x: torch.Tensor) -> torch.Tensor:
    seen.append(products.fp32_precision)
    return x + 0


def call_until_finished(x: torch.Tensor) -> torch.Tensor:
    """A call that lasts until `finish` is set."""
    started.set()
    assert finish.wait(60)
    return record_setting(x)


look_op = _isolated(record_setting)
stay_op = _isolated(call_until_finished)
x = torch.zeros(1)


@pytest.fixture(autouse=True)
def allowing_bf16() -> Iterator[None]:
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    seen.clear()
    started.clear()
    finish.clear()
    yield
    products.fp32_precision = before


@pytest.fixture
def another_call() -> Iterator[threading.Thread]:
    """A call that is running in another thread."""
    thread = threading.Thread(target=stay_op, args=(x,))
    thread.start()
    assert started.wait(60)
    yield thread
    finish.set()
    thread.join()


def in_a_fork() -> list[str]:
    """The setting in a child process: at its start, inside a call, and after the call."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        found = [products.fp32_precision]
        products.fp32_precision = "tf32"
        look_op(x)
        os.write(writer, " ".join([*found, seen[-1], products.fp32_precision]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said, _, _ = select.select([stream], [], [], 60)
        if not said:
            os.kill(child, signal.SIGKILL)  # it waits for a lock that its parent held
        os.waitpid(child, 0)
        assert said, "the child of the fork did not finish within 60 s"
        return stream.read().split()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_child_of_a_process_with_a_call_running(another_call: threading.Thread):
    """The child starts with the parent's setting outside of calls, is exact in a call, and keeps its own setting."""
    assert in_a_fork() == ["bf16", "ieee", "tf32"]


def test_the_parent_goes_on_as_before(another_call: threading.Thread):
    in_a_fork()
    finish.set()
    another_call.join()
    assert (seen[-1], products.fp32_precision) == ("ieee", "bf16")


def test_a_setting_of_another_thread_is_kept(another_call: threading.Thread):
    products.fp32_precision = "tf32"
    finish.set()
    another_call.join()
    assert products.fp32_precision == "tf32"


def test_a_call_is_exact_whatever_was_set_while_another_one_runs(another_call: threading.Thread):
    products.fp32_precision = "tf32"
    look_op(x)
    assert seen == ["ieee"]
    finish.set()
    another_call.join()
    assert products.fp32_precision == "tf32"


def test_the_last_of_several_calls_restores(another_call: threading.Thread):
    look_op(x)
    assert products.fp32_precision == "ieee"  # the other one is still inside
    finish.set()
    another_call.join()
    assert (seen, products.fp32_precision) == (["ieee", "ieee"], "bf16")
