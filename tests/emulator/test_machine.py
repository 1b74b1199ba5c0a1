"""Unit tests of the emulator: shared memory, matrix products, values, pointers, PTX."""

import pytest
import torch
from tests.emulator import ptx
from tests.emulator.fault import Fault
from tests.emulator.machine import Machine, Product, product_wait
from tests.emulator.shared_memory import SharedMemory
from tests.emulator.value import Pointer, Value
from triton.experimental.gluon import language as gl

BF16 = torch.bfloat16


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def tile(machine: Machine, x: torch.Tensor, layout: object = None) -> SharedMemory:
    """A fenced copy of x in shared memory."""
    memory = SharedMemory.allocate(machine.program, x.dtype, list(x.shape), layout)
    memory.store(Value(x))
    machine.program.current.fence()
    return memory


# --- shared memory ---


def test_rows_longer_than_the_swizzle_are_stored_in_blocks():
    """A tile [64, 64] can be reinterpreted as four tiles [32, 32]: top left, bottom left, top right, bottom right."""
    x = numbers(64, 64, dtype=torch.float32).bfloat16()
    whole = tile(Machine(), x, gl.NVMMASharedLayout(64, 16, 2))
    quarters = whole.reinterpret(BF16, [4, 32, 32], gl.NVMMASharedLayout(64, 16, 2))
    for i, (row, column) in enumerate([(0, 0), (32, 0), (0, 32), (32, 32)]):
        assert torch.equal(quarters.index(i).load().t, x[row : row + 32, column : column + 32])
    assert torch.equal(whole.load().t, x)
    assert torch.equal(whole.permute((1, 0)).load().t, x.mT)
    assert torch.equal(whole.slice(16, 16).load().t, x[16:32])
    assert torch.equal(whole.slice(48, 16, dim=1).load().t, x[:, 48:])


def test_views_share_memory_and_invalid_views_are_refused():
    memory = tile(Machine(), numbers(2, 8, 16))
    memory.index(1).slice(4, 4).permute((1, 0)).store(Value(torch.zeros(16, 4)))
    assert torch.equal(memory.load().t[1, 4:], torch.zeros(4, 16))
    for wrong in (
        lambda: memory.index(2),
        lambda: memory.index(0).slice(2, 4),
        lambda: memory.index(0).slice(8, 8),
        lambda: memory.index(0).slice(0, 4).reinterpret(torch.float32, [4, 16], None),
        lambda: memory.reinterpret(torch.float32, [17, 16], None),
        lambda: memory.reinterpret(torch.float32, [8, 16], None),
        lambda: memory.store(Value(numbers(8, 16))),
    ):
        with pytest.raises(Fault):
            wrong()


def test_new_memory_is_nan():
    memory = SharedMemory.allocate(Machine().program, BF16, [8, 8], None)
    assert memory.load().t.isnan().all()


# --- products ---


def test_a_product_is_nan_where_its_operand_changes_in_flight():
    """Only the columns of the result that depend on the changed rows become NaN."""
    machine = Machine()
    program, keys = machine.program, tile(machine, numbers(16, 8).bfloat16())
    product = Product(program, Value(torch.ones(4, 8).bfloat16()), keys.permute((1, 0)), None, False)
    keys.slice(8, 8).store(Value(torch.zeros(8, 8).bfloat16()))
    found = product_wait(program, 0, [product]).t
    assert found[:, 8:].isnan().all()
    assert torch.equal(found[:, :8], numbers(16, 8)[:8].sum(1).expand(4, 8))
    assert machine.changed


def test_rewriting_equal_contents_in_flight_is_harmless():
    machine = Machine()
    keys = tile(machine, numbers(8, 8).bfloat16())
    product = Product(machine.program, Value(torch.ones(4, 8).bfloat16()), keys, None, False)
    keys.store(keys.load())
    assert not product_wait(machine.program, 0, [product]).t.isnan().any()


def test_products_accumulate_and_float32_operands_are_truncated_to_tf32():
    machine = Machine()
    one, more = 1 + 2.0**-10, 1 + 2.0**-10 + 2.0**-11
    x = tile(machine, torch.full((8, 8), more))
    first = Product(machine.program, Value(torch.eye(8)), x, Value(torch.ones(8, 8)), True)
    second = Product(machine.program, Value(torch.eye(8)), x, first, True)
    with pytest.raises(Fault, match="before it was waited for"):
        product_wait(machine.program, 1, [second])
    assert torch.equal(product_wait(machine.program, 0, [second]).t, torch.full((8, 8), 1 + 2 * one))


# --- values and pointers ---


def test_augmented_assignment_rebinds_the_name():
    x = y = Value.of(3)
    x += 2
    assert (int(x), int(y)) == (5, 3)


def test_dtype_promotion_is_that_of_triton():
    """A Python number takes the tensor's dtype. Two tensors are promoted, even if one has no dimensions."""
    half, wide = Value(torch.ones(2, dtype=BF16)), Value(torch.ones((), dtype=torch.float32))
    assert (half * 2.0).dtype == BF16
    assert (half * wide).dtype == torch.float32
    assert (Value.of(2) * Value(torch.tensor(3))).dtype == torch.int64
    assert (Value.of(2) * 0.5).dtype == torch.float32
    assert int(Value.of(-7) // 2) == -3
    assert int(Value.of(-7) % 2) == -1


def test_out_of_bounds_pointers_are_refused():
    x = numbers(4, 4)
    p = Pointer(x[1:]) + Value(torch.arange(4))
    assert torch.equal((p + 8).load().t, x[3])
    assert torch.equal((p + 10).load(mask=Value(torch.arange(4) < 2), other=7).t, torch.tensor([14.0, 15, 7, 7]))
    for wrong in (lambda: (p + 10).load(), lambda: (p + 10).store(0.0), lambda: (p + -5).load()):
        with pytest.raises(Fault, match="outside of its tensor"):
            wrong()


# --- PTX ---


def test_ptx_splits_float32_into_bfloat16_parts():
    x = torch.randn(4, 8)
    asm = "cvt.rn.bf16x2.f32 $0, $3, $2; shl.b32 $1, $0, 16;"
    asm += " sub.f32 $1, $2, $1; cvt.rn.bf16x2.f32 $1, 0f00000000, $1;"
    high, low = ptx.run(asm, "=r,=r,f,f", x, None, (BF16, BF16), 2)
    assert torch.equal(high, x.bfloat16())
    assert torch.equal(low[:, ::2], (x - x.bfloat16().float()).bfloat16()[:, ::2])
    assert not low[:, 1::2].any()


@pytest.mark.parametrize(
    ("shuffle", "expected"),
    [
        ("up.b32 $0|p, $1, 1, 0x1c00", [0, 0, 1, 2, 4, 4, 5, 6]),
        ("down.b32 $0|p, $1, 2, 0x1c03", [2, 3, 2, 3, 6, 7, 6, 7]),
        ("idx.b32 $0, $1, 1, 0x1c1f", [1, 1, 1, 1, 5, 5, 5, 5]),
    ],
)
def test_ptx_shuffles_stay_within_a_row(shuffle: str, expected: list[int]):
    layout = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    (found,) = ptx.run(f"shfl.sync.{shuffle}, 0xffffffff;", "=f,f", numbers(1, 8), layout, (torch.float32,), 1)
    assert found[0].tolist() == expected


def test_ptx_predicates():
    layout = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    asm = "{ .reg .pred p; shfl.sync.up.b32 $0|p, $1, 1, 0x1c00, 0xffffffff; @!p mov.f32 $0, 0f3f800000; }"
    (found,) = ptx.run(asm, "=f,f", numbers(1, 4), layout, (torch.float32,), 1)
    assert found[0].tolist() == [1, 0, 1, 2]


def test_unknown_ptx_is_refused():
    with pytest.raises(ValueError, match="not implemented"):
        ptx.run("mul.f32 $0, $1, $1;", "=f,f", numbers(4), None, (torch.float32,), 1)
    with pytest.raises(ValueError, match="needs a blocked or MMA layout"):
        ptx.run("shfl.sync.idx.b32 $0, $1, 0, 0x1c1f, 0xffffffff;", "=f,f", numbers(4), None, (torch.float32,), 1)
