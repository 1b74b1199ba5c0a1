"""Launches by the driver itself pass what Triton's launcher does."""

import shutil

import pytest
from tests.processes import with_package

from wyfold.runtime import direct_launch

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="no launch is bound in the interpreter"),
    pytest.mark.skipif(
        tuple(map(int, triton.__version__.split(".")[:2])) != direct_launch.KNOWN, reason="Triton's launcher is used"
    ),
    pytest.mark.skipif(shutil.which("cc") is None, reason="Triton compiles its launcher by a C compiler"),
]


def test_the_driver_gets_what_it_gets_from_triton(tmp_path):
    done = with_package().run(["-m", "tests.runtime.direct_launches", tmp_path])
    assert done.returncode == 0, done.stderr
    copied, numbers = map(int, done.stdout.split())
    assert (copied, numbers) == (16, 11)
