"""`TRITON_INTERPRET=1` with `backend="triton"` gave wrong results without an error.

Triton's interpreter rounds a fused multiply-add twice and computes with the bits of bfloat16 as integers. Only the test
suite repairs it. Every operator must refuse the unmodified interpreter, on CPU and on CUDA tensors, and `doctor` must
report it.
"""

import json
import os

import pytest
from tests import processes

from wyfold.cli.operators import OPERATOR_SPECS

SCRIPT = """
import json
import torch, wyfold
from wyfold import serving
from wyfold.cli.operators import OPERATOR_SPECS
from wyfold.reference.shapes import Shape
from wyfold.runtime import triton_support
from wyfold.kernels import table

def outcome(run):
    try:
        run()
    except wyfold.UnsupportedError as error:
        return str(error)
    return "served"

found = {}
for name, subject in OPERATOR_SPECS.items():
    arguments = subject.arguments(Shape(1, 5, 1, 2, 16, 16), torch.float32, 0)
    found[name] = outcome(lambda: getattr(wyfold, subject.operator)(**arguments, backend="triton"))
x, slots, pool = torch.randn(2, 1, 2, 16), torch.arange(2, dtype=torch.int32), torch.zeros(3, 2, 16, 16)
served = {"state_v_first": False, "backend": "triton"}
found["decode"] = outcome(lambda: serving.decode(x, x, x, None, torch.rand(2, 1, 2), pool, slots, **served))
# A GPU that is supported, so that only the interpreter is a reason to refuse.
triton_support.support_of = lambda device: triton_support.Support("sm_90", "3.6.0", True, "")
found["on CUDA"] = table.refusal(torch.device("cuda"), None)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = processes.fresh().run(["-c", SCRIPT], env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_call_is_refused_with_the_reason_and_what_to_do(outcomes: dict[str, str]):
    assert len(outcomes) > 20
    for name in [name for name, spec in OPERATOR_SPECS.items() if not spec.kernels]:
        assert "no kernel for this operator" in outcomes.pop(name)
    for name, outcome in outcomes.items():
        for said in ("TRITON_INTERPRET=1", "wrong numbers", 'backend="eager"'):
            assert said in outcome, f"{name}: {outcome}"


def test_doctor_says_that_kernels_are_refused():
    code = "import wyfold; print(wyfold.doctor())"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = processes.fresh().run(["-c", code], env=environment)
    assert "computes wrong numbers" in done.stdout, done.stdout + done.stderr
