"""`enter`, `leave` and `leave_between` in PyTorch."""

from __future__ import annotations

from wyfold.kernels.state_pool.eager.slots import entered, is_slot
from wyfold.kernels.state_pool.eager.states import enter, leave, leave_between, leave_each

__all__ = ["enter", "entered", "is_slot", "leave", "leave_between", "leave_each"]
