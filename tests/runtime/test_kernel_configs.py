"""Launch configurations and what is known about Triton: data in, one row or one refusal out."""

import importlib.metadata
import importlib.util
import json
from importlib import resources

import pytest
import torch

from wyfold.runtime import kernel_configs, triton_support
from wyfold.runtime.kernel_configs import Config

CPU = torch.device("cpu")
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


@pytest.fixture
def rows(monkeypatch):
    """Replace every architecture's table by the given one."""

    def replace(table: dict[str, dict[str, dict[str, int]]]) -> None:
        monkeypatch.setattr(triton_support, "config_text", lambda name: json.dumps(table))
        for cached in (kernel_configs._table, kernel_configs.row):
            cached.cache_clear()

    yield replace
    for cached in (kernel_configs._table, kernel_configs.row):
        cached.cache_clear()


def test_the_row_with_the_most_words_is_taken(rows):
    rows(
        {
            "scan.triton": {
                "default": {"warps": 1, "stages": 1},
                "fp32": {"warps": 2, "stages": 1},
                "fp32 BK256": {"warps": 3, "stages": 1},
                "fp32 K200 C64": {"warps": 4, "stages": 1},
                "bf16 K128 V128 C64 scalar WF": {"warps": 5, "stages": 3, "BV": 64, "registers": 168},
            }
        }
    )

    def warps(key: str) -> int:
        return kernel_configs.tuned("scan.triton", key, CPU).warps

    assert warps("bf16 K128 V128 C64 none WF") == 1
    assert warps("fp32 K128 V128 C64 none WF") == 2
    assert warps("fp32 K136 V8 C64 none WF") == warps("fp32 K256 V8 C64 none WF") == 3
    assert warps("fp32 K200 V8 C64 none WF") == 4
    exact = kernel_configs.tuned("scan.triton", "bf16 K128 V128 C64 scalar WF", CPU)
    assert exact == Config(5, 3, {"BV": 64}, 168)
    assert exact.options() == {"num_warps": 5, "num_stages": 3, "enable_fp_fusion": True, "maxnreg": 168}
    assert "maxnreg" not in kernel_configs.tuned("scan.triton", "bf16", CPU).options()


def test_occupancy_is_low_up_to_half_of_the_multiprocessors(monkeypatch):
    monkeypatch.setattr(kernel_configs, "processors", lambda device: 132)
    assert kernel_configs.with_occupancy_hint("bf16 C64", 66, CPU) == "bf16 C64 low_occupancy"
    assert kernel_configs.with_occupancy_hint("bf16 C64", 67, CPU) == "bf16 C64"


@pytest.mark.parametrize("word, tile", [("K8", "BK16"), ("V16", "BV16"), ("K24", "BK32"), ("V256", "BV256")])
def test_the_tile_of_a_width(word: str, tile: str):
    assert kernel_configs._tile(word) == tile


@pytest.mark.parametrize("word", ["bf16", "C64", "V", "Kernel", "scalar"])
def test_other_words_are_no_widths(word: str):
    assert kernel_configs._tile(word) == word


def test_hardware_limits_name_existing_kernels_and_architectures():
    for limit in json.loads(triton_support.config_text("support"))["beyond"]:
        assert set(limit) == {"kernel", "key", "architectures", "reason", "remedy"}
        assert limit["kernel"] in kernel_configs._table("sm_90") and set(limit["architectures"]) <= set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_every_kernel_and_a_default(architecture: str):
    """Except kernels in Gluon, which serve only keys with a row."""
    table, named = (
        kernel_configs._table(architecture),
        {name for name in kernel_configs._table("sm_90") if not name.endswith(".gluon")},
    )
    assert set(table) >= named and all(name in named or name.endswith(".gluon") for name in table)
    for kernel, shipped in table.items():
        assert "default" in shipped or kernel not in named, kernel
        for name, config in shipped.items():
            assert config.warps in (1, 2, 4, 8, 16) and 1 <= config.stages <= 8, (kernel, name)
            assert 32 * config.warps * (config.registers or 0) <= 65_536, (kernel, name)
            tiles = [size for block, size in config.blocks.items() if block[0] == "B" or block == "TILE"]
            assert all(size & (size - 1) == 0 for size in tiles), (kernel, name)


def test_the_interpreter_takes_the_rows_of_sm_90():
    assert triton_support.architecture(CPU) == "sm_90"


# --- which Triton on which card --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.1"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_listed_pair_runs(architecture: str, version: str):
    support = triton_support.support_for(architecture, version)
    assert not support.refusal
    assert not support.verified or architecture == "sm_90", "no other card was ever in reach"


@pytest.mark.parametrize(
    "architecture, version, reason",
    [
        ("sm_90", "3.5.1", r"Triton 3\.5\.1 is known to be wrong on sm_90: .*transposed"),
        ("sm_90", "", "Triton is not installed"),
    ],
)
def test_an_unsupported_version_is_refused_with_what_to_install(architecture: str, version: str, reason: str):
    support = triton_support.support_for(architecture, version)
    assert not support.verified
    with pytest.raises(ValueError, match=rf'{reason}.*; pip install "torch>=2\.11,<2\.16"'):
        raise ValueError(support.refusal)


@pytest.mark.parametrize("version", ["3.6.0", "3.10.0", "4.0.0"])
@pytest.mark.parametrize("architecture", ["sm_75", "sm_110", "gfx1100"])
def test_an_unlisted_card_or_version_is_neither_verified_nor_refused(architecture: str, version: str):
    support = triton_support.support_for(architecture, version)
    assert not support.verified and not support.refusal


@pytest.mark.parametrize(
    "architecture, file",
    [("sm_75", "sm_80"), ("sm_87", "sm_86"), ("sm_90", "sm_90"), ("sm_101", "sm_100"), ("gfx1100", "sm_80")],
)
def test_an_unlisted_card_borrows_the_rows_of_an_older_one(architecture: str, file: str):
    """But no Gluon row, whose presence would select a kernel that the card may not run."""
    assert kernel_configs.borrowed_from(architecture) == file
    assert kernel_configs.shipped(architecture) == kernel_configs.shipped(file)
    for kernel, rows in kernel_configs.shipped(architecture).items():
        for name in rows:
            assert kernel_configs.has_row(architecture, kernel, name) == (architecture == file), (kernel, name)


def test_without_a_card_there_is_nothing_to_judge(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    triton_support.support_of.cache_clear()
    assert "no CUDA device" in triton_support.support_of(torch.device("cuda")).refusal
    triton_support.support_of.cache_clear()


def test_the_version_is_read_without_an_import(monkeypatch):
    triton_support.triton_version.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert triton_support.triton_version() == ""
    triton_support.triton_version.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"triton": "3.6.0"}[name])
    assert triton_support.triton_version() == "3.6.0"
    triton_support.triton_version.cache_clear()


def test_the_tables_are_package_data():
    folder = resources.files("wyfold.runtime").joinpath("configs")
    assert {f"{name}.json" for name in (*ARCHITECTURES, "support")} <= {file.name for file in folder.iterdir()}
