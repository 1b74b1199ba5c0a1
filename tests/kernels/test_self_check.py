"""Self-check of kernels at first use: when it runs, what is remembered, and what is refused. No kernel runs here.

The card and the comparison are simulated. `tests/interpret/test_self_check.py` has the comparison.
"""

import ast
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import wyfold
from wyfold import UnsupportedError
from wyfold.kernels import self_check, table, verdicts
from wyfold.kernels.trial import Sample, Trial
from wyfold.reference.error import Errors, Verdict
from wyfold.runtime import kernel_configs, triton_support, user_cache
from wyfold.runtime.plan import plan_of

CUDA = torch.device("cuda", 0)
TRIAL = Trial("chunk_kda", "delta_fwd", (Sample("unit", torch.bfloat16, "BT", (2, 64)),), ("triton",))
RIGHT = Verdict("dq", torch.bfloat16, Errors(1e-3, 1e-3, 1e-3), Errors(4e-3, 1e-2, 1e-2), "")
WRONG = Verdict("dk", torch.bfloat16, Errors(3.1e-1, 1.0, 1.0), Errors(6e-3, 1e-2, 1e-2), "over in rms")


class Machine:
    """A simulated card. `verdicts` is what its kernels give; `runs` counts checks; `capturing` sets a capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path):
        self.monkeypatch, self.verdicts, self.runs, self.capturing = monkeypatch, [RIGHT], 0, False
        self.support = triton_support.support_for("sm_103", "3.9.0")
        monkeypatch.setenv("WYFOLD_CACHE", str(folder))
        monkeypatch.delenv("WYFOLD_SELF_CHECK", raising=False)
        monkeypatch.setattr(triton_support, "support_of", lambda device: self.support)
        monkeypatch.setattr(triton_support, "architecture", lambda device: self.support.architecture)
        monkeypatch.setattr(kernel_configs, "processors", lambda device: 132)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {self.support.architecture}")
        monkeypatch.setattr(self_check, "capturing", lambda device: self.capturing)
        monkeypatch.setattr(self_check, "_on_new_thread", lambda run, device: run())
        monkeypatch.setattr(self_check, "verdicts", self._judge)
        monkeypatch.setattr(self_check, "_trusting", False)
        monkeypatch.setattr(self_check, "_said", set())
        self.new_process()

    def _judge(self, trial: Trial, device: torch.device) -> list[Verdict]:
        self.runs += 1
        if isinstance(self.verdicts, Exception):
            raise self.verdicts
        return self.verdicts

    def new_process(self) -> None:
        """Forget what is in memory."""
        self.monkeypatch.setattr(self_check, "_outcomes", {})
        self.toolchain(triton="3.9.0")

    def toolchain(self, **versions: str) -> None:
        found = {"triton": "3.9.0", "torch": "2.15.0", "cuda": "13.0", "sources": "abc", **versions}
        self.monkeypatch.setattr(self_check, "toolchain", lambda: found)

    def plan(self, backend: str | None = None, small: Trial = TRIAL, **options: Any) -> Any:
        return table.plan(
            "chunk_kda", CUDA, backend, forward=("scan",), dtypes=(torch.bfloat16,), trials=lambda: (small,), **options
        )

    def refusal(self, backend: str | None = None) -> str:
        with pytest.raises(UnsupportedError) as refused:
            self.plan(backend)
        assert str(refused.value).startswith("chunk_kda: no backend serves this call on cuda")
        return refused.value.reasons["triton"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.json"))


@pytest.mark.parametrize("architecture, version", [("sm_103", "3.9.0"), ("sm_90", "4.0.0"), ("sm_80", "3.6.0")])
def test_the_first_use_checks_once_and_a_later_process_not_at_all(architecture, version, machine, tmp_path, capsys):
    """An unlisted card, an unlisted Triton, and a pair for which the kernels were compiled only."""
    machine.support = triton_support.support_for(architecture, version)
    for _ in range(3):
        assert machine.plan().self_check == "passed"
    said = capsys.readouterr().err
    assert machine.runs == 1 and said.count("\n") == 1
    assert said.startswith("wyfold: first use of chunk_kda (bfloat16, 2 x 64, with gradients) on card ")
    machine.new_process()
    assert machine.plan().self_check == "passed"
    assert machine.runs == 1 and capsys.readouterr().err == ""
    (file,) = files(tmp_path)
    record = json.loads(file.read_text())
    assert record["passed"] and record["tensors"] == {"dq": {"error": 1e-3, "allowed": 4e-3}}
    assert record["card"] == f"card {architecture} ({architecture})"


def test_a_verified_card_is_not_checked(machine, tmp_path):
    machine.support = triton_support.support_for("sm_90", "3.6.0")
    assert machine.plan().self_check == "verified"
    assert machine.runs == 0 and not files(tmp_path)


def test_widths_that_ran_on_no_card_are_checked_on_a_verified_one(machine):
    machine.support = triton_support.support_for("sm_90", "3.6.0")
    assert [machine.plan(unrun=True).self_check for _ in range(2)] == ["passed"] * 2 and machine.runs == 1


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.* is deprecated:DeprecationWarning")
def test_a_trace_is_checked_like_any_other_call(machine):
    """`torch.jit.trace` makes tensors of sizes, and of the numbers that follow from them. They are no keys."""
    traced = []

    def call(x: torch.Tensor) -> torch.Tensor:
        heads, width = x.shape[2:]
        small = TRIAL._replace(samples=(TRIAL.samples[0]._replace(rest=(heads, width)),), values=("triton", 2 * width))
        traced.append(machine.plan(small=small).self_check)
        return 2 * x

    x = torch.zeros(1, 3, 2, 64)
    call(x)
    for _ in range(2):
        torch.jit.trace(call, x, check_trace=False)
    assert traced == ["passed"] * 3 and machine.runs == 1


@pytest.mark.parametrize("D", [60, 64])
def test_which_widths_ran_on_no_card(D: int, monkeypatch):
    """Those of TTT-Linear and of key grams that are no multiple of 8."""
    noted = []
    usual = table.plan
    monkeypatch.setattr(
        table, "plan", lambda *args, **options: noted.append(options["unrun"]) or usual(*args, **options)
    )
    x, w = torch.ones(1, 1, 1, D), torch.ones(1, D)
    states = torch.zeros(1, 1, D, D), torch.zeros(1, 1, 1, D)
    wyfold.chunk_ttt_linear(x, x, x, w, w, 0.1)
    wyfold.serving.ttt_decode(
        x, x, x, w, w, 0.1, wyfold.TTTState(*states, *map(torch.clone, states), torch.zeros(1, dtype=torch.int32))
    )
    wyfold.chunk_scaled_dot_kkt(x, torch.ones(1, 1, 1))
    assert noted == [D == 60] * 3


def test_a_wrong_kernel_is_refused_with_its_figure_and_a_remedy(machine):
    machine.verdicts = [RIGHT, WRONG]
    said = machine.refusal()
    assert "dk has relative error 3.1e-01, allowed are 6.0e-03" in said and "dq" not in said
    assert 'use backend="eager"' in said and "`wyfold verify --out DIR`" in said
    machine.new_process()
    machine.verdicts = [RIGHT]
    assert machine.refusal("triton") == said
    assert machine.runs == 1
    assert machine.plan("eager").backend == "eager"


@pytest.mark.parametrize(
    "change",
    [{"triton": "3.9.1"}, {"torch": "2.16.0"}, {"cuda": "13.1"}, {"sources": "other kernels"}],
    ids=lambda change: next(iter(change)),
)
def test_another_toolchain_or_source_is_checked_again(change: dict[str, str], machine):
    machine.plan()
    machine.new_process()
    machine.toolchain(**change)
    machine.plan()
    assert machine.runs == 2


def test_versions_and_sources_make_the_toolchain(tmp_path: Path, monkeypatch):
    """Any change of a file that decides what is launched is another toolchain."""
    rooms = ("autograd", "kernels", "runtime", "tile")
    for name in rooms:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(self_check.resources, "files", lambda _: tmp_path)
    hashes = {self_check._source_hash.__wrapped__()}
    for name in rooms:
        for file in ("triton.py", "sm_90.json"):
            (tmp_path / name / file).write_text("1")
            hashes.add(self_check._source_hash.__wrapped__())
    assert len(hashes) == 1 + 2 * len(rooms)
    monkeypatch.setattr(self_check, "_source_hash", lambda: "these kernels")
    found = self_check.toolchain.__wrapped__()
    assert found.keys() == {"triton", "torch", "cuda", "ptxas", "interpreted", "sources"}
    assert found["torch"] == torch.__version__ and found["sources"] == "these kernels"


@pytest.mark.parametrize(
    "other",
    [
        TRIAL._replace(samples=(Sample("unit", torch.float16, "BT", (2, 64)),)),
        TRIAL._replace(samples=(Sample("unit", torch.bfloat16, "BT", (2, 128)),)),
        TRIAL._replace(gradients=False),
        TRIAL._replace(values=("another option", "triton")),
    ],
    ids=["dtype", "width", "gradients", "option"],
)
def test_another_kernel_is_checked_too(other: Trial, machine):
    machine.plan()
    machine.plan(small=other)
    assert machine.runs == 2


def test_another_card_is_checked_too(machine):
    machine.plan()
    machine.support = triton_support.support_for("sm_121", "3.9.0")
    machine.plan()
    assert machine.runs == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"passed": true}',
        b"{" + b" " * 2**20 + b"}",
        {"passed": "yes"},
        {"passed": False},
        {"refusal": None},
        {"card": "another"},
    ],
    ids=["empty", "torn", "list", "no text", "partial", "huge", "type", "contradiction", "null", "another card"],
)
def test_a_damaged_file_is_ignored_and_rewritten(content, machine, tmp_path):
    machine.plan()
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(json.dumps(json.loads(whole) | content).encode() if isinstance(content, dict) else content)
    machine.new_process()
    assert machine.plan().self_check == "passed"
    assert machine.runs == 2 and file.read_bytes() == whole


def test_without_a_writable_folder_each_process_checks_once(machine, tmp_path, monkeypatch, capsys):
    """Below a regular file no folder can be made, not even by an administrator."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WYFOLD_CACHE", str(tmp_path / "file" / "cache"))
    for _ in range(3):
        assert machine.plan().self_check == "passed"
    machine.plan(small=TRIAL._replace(gradients=False))
    said = capsys.readouterr().err.splitlines()
    assert machine.runs == 2 and len(said) == 3
    assert "could not be stored in" in said[1] and "WYFOLD_CACHE names another folder" in said[1]
    machine.new_process()
    machine.plan()
    assert machine.runs == 3


def test_without_a_home_each_process_checks_once(machine, monkeypatch, capsys):
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("WYFOLD_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    for _ in range(2):
        assert machine.plan().self_check == "passed"
    assert machine.runs == 1 and "there is no home folder" in capsys.readouterr().err
    assert self_check.remembered_here() == []


def test_the_folder_follows_the_usual_variables(monkeypatch):
    monkeypatch.delenv("WYFOLD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/one"))
    assert user_cache.cache_folder() == Path("/home/one/.cache/wyfold")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert user_cache.cache_folder() == Path("/caches/wyfold")
    monkeypatch.setenv("WYFOLD_CACHE", "/mine")
    assert user_cache.cache_folder() == Path("/mine")


def test_a_known_bad_triton_is_refused_without_a_check(machine):
    machine.support = triton_support.support_for("sm_90", "3.5.0")
    with pytest.raises(UnsupportedError, match="known to be wrong on sm_90"):
        machine.plan()
    assert machine.runs == 0


def test_an_opt_out_refuses_what_has_not_passed(machine, monkeypatch):
    monkeypatch.setenv("WYFOLD_SELF_CHECK", "refuse")
    said = machine.refusal()
    assert "WYFOLD_SELF_CHECK=refuse" in said and "`wyfold verify`" in said and machine.runs == 0
    with pytest.raises(UnsupportedError):
        plan_of(machine.plan)
    monkeypatch.setenv("WYFOLD_SELF_CHECK", "run")
    machine.plan()
    machine.new_process()
    monkeypatch.setenv("WYFOLD_SELF_CHECK", "refuse")
    assert machine.plan().self_check == "passed"  # by the earlier process


def test_an_unknown_setting_is_refused(machine, monkeypatch):
    monkeypatch.setenv("WYFOLD_SELF_CHECK", "never")
    with pytest.raises(ValueError, match=r"^WYFOLD_SELF_CHECK must be one of run, refuse, got 'never'"):
        machine.plan()


def test_a_capture_is_refused_and_the_call_before_it_is_the_remedy(machine):
    machine.capturing = True
    said = machine.refusal()
    assert "while a CUDA graph is captured" in said and "before the capture" in said and "`wyfold verify`" in said
    assert machine.runs == 0
    machine.capturing = False
    machine.plan()
    machine.capturing = True
    assert machine.plan().self_check == "passed"


def test_a_kernel_that_raises_is_refused_and_tried_again_by_the_next_process(machine, tmp_path):
    machine.verdicts = RuntimeError("out of resources\nand more")
    said = machine.refusal()
    assert "they raised RuntimeError: out of resources;" in said and not files(tmp_path)
    assert machine.refusal() == said and machine.runs == 1
    machine.new_process()
    machine.verdicts = [RIGHT]
    assert machine.plan().self_check == "passed"


def test_a_check_without_memory_is_made_by_the_next_call(machine, tmp_path):
    machine.verdicts = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    said = machine.refusal()
    assert "no free memory" in said and "call again" in said and "report" not in said and not files(tmp_path)
    machine.verdicts = [RIGHT]
    assert machine.plan().self_check == "passed" and machine.runs == 2


@pytest.mark.parametrize("norm", [False, True])
def test_a_check_draws_rows_of_different_norms_where_kernels_divide_by_them(norm: bool, monkeypatch):
    """The key along which Comba reads was drawn with one norm; kernels that took a neighbour's norm passed."""
    noted: list[Trial] = []
    usual = table.plan
    monkeypatch.setattr(
        table, "plan", lambda *args, **options: noted.extend(options["trials"]()) or usual(*args, **options)
    )
    x = torch.ones(1, 2, 1, 8)
    wyfold.chunk_comba(x, x, x, x, use_qk_l2norm_in_kernel=norm)
    q, k, p = (noted[0].samples[place] for place in (0, 1, 10))
    assert [x and x.kind for x in (q, k, p)] == ["normal" if norm else "unit"] * 3


def test_explain_runs_nothing_and_reports_the_state(machine):
    assert plan_of(machine.plan).self_check == "not run"
    assert machine.runs == 0
    machine.plan()
    found = plan_of(machine.plan)
    assert found.self_check == "passed" and "self-check   passed" in str(found)
    machine.verdicts = [WRONG]
    other = TRIAL._replace(gradients=False)
    with pytest.raises(UnsupportedError):
        machine.plan(small=other)
    with pytest.raises(UnsupportedError, match="allowed are"):
        plan_of(lambda: machine.plan(small=other))


def test_threads_share_one_check(machine, monkeypatch):
    started, usual = threading.Barrier(4), self_check.verdicts

    def slow(trial: Trial, device: torch.device) -> list[Verdict]:
        threading.Event().wait(0.05)
        return usual(trial, device)

    monkeypatch.setattr(self_check, "verdicts", slow)

    def call() -> None:
        started.wait()
        machine.plan()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert machine.runs == 1


def test_the_check_has_none_of_the_callers_settings():
    seen = {}

    def look() -> None:
        seen["grad"], seen["autocast"] = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        seen["thread"] = threading.current_thread().name

    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        self_check._on_new_thread(look, torch.device("cpu"))
    assert seen == {"grad": True, "autocast": False, "thread": "wyfold self-check"}
    with pytest.raises(KeyError, match="reaches the caller"):
        self_check._on_new_thread(lambda: {}["reaches the caller"], torch.device("cpu"))


def test_verification_checks_again_and_stores_the_answer(machine, tmp_path):
    """`collecting` asks for a check of verified, passed and failed kernels alike, once per kernel."""
    machine.verdicts = [WRONG]
    machine.refusal()
    machine.verdicts = [RIGHT]
    with self_check.collecting() as found:
        assert machine.plan().self_check == machine.plan().self_check == "passed"
    assert machine.runs == 2 and [record["passed"] for record in found.values()] == [True]
    machine.new_process()
    assert machine.plan().self_check == "passed" and machine.runs == 2
    machine.support = triton_support.support_for("sm_90", "3.6.0")
    with self_check.collecting() as found:
        machine.plan()
    assert machine.runs == 3 and len(found) == 1


NEAR = Verdict("dg", torch.bfloat16, Errors(5e-3, 1e-3, 1e-3), Errors(4e-3, 1e-2, 1e-2), "over in rms")
INFINITE = Verdict("o", torch.bfloat16, Errors(*[float("inf")] * 3), Errors(*[float("inf")] * 3), "not finite where ..")


@pytest.mark.parametrize(
    "draws, used",
    [
        ([[RIGHT]], 1),
        ([[NEAR, RIGHT], [RIGHT]], 2),
        ([[NEAR], [NEAR], [RIGHT]], 3),
        ([[NEAR], [NEAR], [NEAR, RIGHT]], 3),
        ([[NEAR, WRONG]], 1),
        ([[NEAR], [WRONG]], 2),
        ([[INFINITE]], 1),
    ],
    ids=["right", "once near", "twice near", "always near", "wrong", "near, then wrong", "not finite"],
)
def test_a_check_that_fails_by_little_is_drawn_again(draws: list[list[Verdict]], used: int, monkeypatch):
    seen = []

    def draw(drawn: Trial, device: torch.device) -> list[Verdict]:
        seen.append(drawn.draw)
        return draws[drawn.draw]

    monkeypatch.setattr(verdicts, "_verdicts", draw)
    assert verdicts.verdicts(TRIAL, CUDA) == draws[used - 1] and seen == list(range(used))


def test_every_plan_has_a_check():
    folder = Path(wyfold.__file__).parent / "ops"
    found = 0
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "table.plan":
                found += 1
                assert "trials" in {keyword.arg for keyword in node.keywords}, f"{file.name}:{node.lineno}"
    assert found >= 9


def test_doctor_lists_the_checks_of_this_toolchain(machine, monkeypatch):
    machine.plan()
    machine.verdicts = [WRONG]
    with pytest.raises(UnsupportedError):
        machine.plan(small=TRIAL._replace(gradients=False))
    checks = wyfold.doctor().self_checks
    assert [(check["operator"], check["passed"]) for check in checks] == [
        ("chunk_kda (bfloat16, 2 x 64, with gradients)", True),
        ("chunk_kda (bfloat16, 2 x 64, without gradients)", False),
    ]
    said = str(wyfold.doctor())
    assert "with gradients) on card sm_103 (sm_103): passed" in said and "allowed are 6.0e-03" in said
    machine.toolchain(triton="4.0.0")
    assert wyfold.doctor().self_checks == ()
    assert "self-checks of kernels" in said and "self-checks of kernels" not in str(wyfold.doctor())


def test_the_time_of_a_check_is_that_of_its_file(machine, tmp_path):
    machine.plan()
    (file,) = files(tmp_path)
    os.utime(file, (1e9, 1e9))
    (check,) = wyfold.doctor().self_checks
    assert check["when"] == 1e9 and "09 Sep 2001" in str(wyfold.doctor())
