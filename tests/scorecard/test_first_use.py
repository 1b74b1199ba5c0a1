"""Import and first use in a fresh process are fast, and start no CUDA.

Seconds are of the process's own work, because other tests run meanwhile.
"""

import json

import pytest
from tests import processes

IMPORT_SECONDS = 1.0
"""Of `import wyfold`, beyond torch."""
FIRST_SECONDS = 20.0
"""Of a layer's first forward and backward."""

CODE = """
import json, time, torch
began = time.process_time()
import wyfold
imported = time.process_time()
cuda = torch.cuda.is_initialized()
from wyfold.layers import GatedDeltaNet
layer = GatedDeltaNet(hidden_size=256, num_heads=2, head_dim=64)
layer(torch.randn(1, 512, 256)).sum().backward()
print(json.dumps({"import": imported - began, "first": time.process_time() - imported, "cuda": cuda}))
"""


@pytest.mark.long
def test_first_use_is_fast():
    done = processes.fresh().run(["-c", CODE])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["cuda"]
    assert found["import"] <= IMPORT_SECONDS and found["first"] <= FIRST_SECONDS
