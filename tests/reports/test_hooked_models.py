"""A hook or wrapper sets `forward` on the instance, so the patched `forward` of the class was not called.

It happened with accelerate's hooks on the text model (a device map with the keys `model` and `lm_head`) and with
`Accelerator().prepare(text_model)`. Packed documents leaked into each other, with errors of 64 to 120 % of the largest
logit, although the report listed `forward` as replaced.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.integrations.hybrids import hybrid
from torch import Tensor

from wyfold.integrations.transformers import patch

pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

LENGTHS = [3, 1, 6]
PACKED = {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
IDS = torch.randint(64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
SHALLOW = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SEPARATE = 1e-6  # packed against separate documents, relative to the largest logit


@pytest.fixture(scope="module")
def apart() -> Tensor:
    """Logits of the documents, each run alone."""
    model = hybrid("qwen3_5", **SHALLOW)
    with torch.no_grad(), patch(model):
        return torch.cat([model(part).logits for part in IDS.split(LENGTHS, 1)], 1)


def hooked(model: Any, text: Any = None) -> Callable[[], Any]:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    text = model.model if text is None else text
    add_hook_to_module(text, ModelHook())
    return lambda: remove_hook_from_module(text)


def dispatched(model: Any) -> Callable[[], Any]:
    accelerate.dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, main_device="cpu", force_hooks=True)
    return lambda: accelerate.hooks.remove_hook_from_module(model, recurse=True)


def compiled_forward(model: Any) -> Callable[[], Any]:
    torch.compiler.reset()
    model.model.forward = torch.compile(model.model.forward, backend="eager")

    def undo() -> None:
        del model.model.forward
        torch.compiler.reset()

    return undo


def compiled_module(model: Any) -> Callable[[], Any]:
    torch.compiler.reset()
    text = model.model
    model.model = torch.compile(text, backend="eager")

    def undo() -> None:
        model.model = text
        torch.compiler.reset()

    return undo


def hooked_then_compiled(model: Any) -> Callable[[], Any]:
    unhook, uncompile = hooked(model), compiled_module(model)

    def undo() -> None:
        uncompile()
        unhook()

    return undo


EAGER = [hooked, dispatched]
BEFORE = [*EAGER, hooked_then_compiled, pytest.param(compiled_forward, marks=pytest.mark.release)]
ANY_ORDER = [*EAGER, compiled_module]


def error(logits: Tensor, expected: Tensor) -> float:
    return float((logits.float() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("wrap", BEFORE)
def test_a_model_wrapped_before_the_patch_keeps_documents_apart(wrap: Any, apart: Tensor):
    model = hybrid("qwen3_5", **SHALLOW)
    unwrap = wrap(model)
    with torch.no_grad(), patch(model):
        assert error(model(IDS, **PACKED).logits, apart) < SEPARATE
        unwrap()
        assert error(model(IDS, **PACKED).logits, apart) < SEPARATE


@pytest.mark.parametrize("wrap", ANY_ORDER)
def test_every_order_of_wrapping_and_patching_is_undone(wrap: Any, apart: Tensor):
    """Wrapped while patched, unwrapped after the patch is undone; in between and at the end it is the stock model."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

    model, forward = hybrid("qwen3_5", **SHALLOW), Qwen3_5TextModel.forward
    with torch.no_grad():
        stock = model(IDS, use_cache=False, **PACKED).logits
        patched = patch(model)
        unwrap = wrap(model)
        assert error(model(IDS, **PACKED).logits, apart) < SEPARATE
        patched.undo()
        calls = dict(patched.report.calls)
        assert error(model(IDS, use_cache=False, **PACKED).logits, stock) < SEPARATE
        unwrap()
        assert error(model(IDS, use_cache=False, **PACKED).logits, stock) < SEPARATE
    assert Qwen3_5TextModel.forward is forward and patched.report.calls == calls


def test_a_prepared_text_model_keeps_documents_apart():
    """In bfloat16, against its own results for the single documents."""
    text = hybrid("qwen3_5", **SHALLOW).model
    accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(text)
    assert "forward" in vars(text)
    with torch.no_grad(), patch(text):
        packed = text(IDS, **PACKED).last_hidden_state
        alone = torch.cat([text(part).last_hidden_state for part in IDS.split(LENGTHS, 1)], 1)
    assert error(packed, alone.float()) < 2e-2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_peft_around_a_hooked_text_model():
    """An adapter around a hooked text model. Its B is zero, so the results are those of the base model."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = hybrid("qwen3_5", **SHALLOW).model
    with torch.no_grad(), patch(model):
        alone = torch.cat([model(part).last_hidden_state for part in IDS.split(LENGTHS, 1)], 1)
    hooked(model, model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["in_proj_qkv"], r=2))
    with torch.no_grad(), patch(adapted):
        assert error(adapted(IDS, **PACKED).last_hidden_state, alone) < SEPARATE
        assert error(model.forward(IDS, **PACKED).last_hidden_state, alone) < SEPARATE


def test_hooks_run_around_and_get_what_the_caller_gave(apart: Tensor):
    """The hook runs once per forward with the caller's arguments, and the caller gets the hook's result."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    seen: list[str] = []

    class Counting(ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append("before")
            return args, kwargs

        def post_forward(self, module: Any, output: Any) -> Any:
            seen.append("after")
            return output

    model = hybrid("qwen3_5", **SHALLOW)
    add_hook_to_module(model.model, Counting())
    with torch.no_grad(), patch(model):
        assert error(model(IDS, **PACKED).logits, apart) < SEPARATE
    assert seen == ["before", "after"]


def test_boundaries_are_read_once_under_a_hook_that_was_made_while_patched(monkeypatch: pytest.MonkeyPatch):
    """Reading positions synchronises with the device."""
    from wyfold.integrations.transformers import installation

    read: list[str] = []
    settled = installation.settled
    monkeypatch.setattr(installation, "settled", lambda op, call: (read.append(op), settled(op, call))[1])
    model = hybrid("qwen3_5", **SHALLOW)
    with torch.no_grad(), patch(model):
        hooked(model)
        model(IDS, **PACKED)
        with pytest.raises(ValueError, match="use_cache must be False"):
            model(IDS, use_cache=True, **PACKED)
        model(IDS, **PACKED)
    assert read == ["patch(qwen3_5)"] * 3


def test_a_hooked_norm_is_reported_as_the_stock_one():
    """Offloading hooks every norm; the hook loads the weight and calls the stock method. The report says so."""
    model = hybrid("qwen3_5", **SHALLOW)
    accelerate.cpu_offload(model, execution_device="cpu")
    with torch.no_grad(), patch(model, norm=True) as patched:
        model(IDS)
    assert set(patched.report.kept) == {f"model.layers.{n}.linear_attn.norm.forward" for n in (0,)}
    assert "norm.forward keeps its own" in str(patched.report)
    assert not any(name == "norm" for _, name, _ in patched.report.calls)


def test_another_function_assigned_to_the_class_stays(apart: Tensor):
    """Undoing our patch keeps another library's later patch of the same class."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

    model, stock = hybrid("qwen3_5", **SHALLOW), Qwen3_5TextModel.forward
    patched = patch(model)
    ours = Qwen3_5TextModel.forward
    try:
        Qwen3_5TextModel.forward = theirs = lambda self, *args, **kwargs: ours(self, *args, **kwargs)
        with torch.no_grad():
            assert error(model(IDS, **PACKED).logits, apart) < SEPARATE
            patched.undo()
            assert Qwen3_5TextModel.forward is theirs
            assert error(model(IDS, use_cache=False, **PACKED).logits, apart) > 1e-2
    finally:
        Qwen3_5TextModel.forward = stock
