"""Launch configurations and what is known about Triton: data in, one row or one refusal out."""

import importlib.metadata
import importlib.util
import json
from importlib import resources
from pathlib import Path

import pytest
import torch

from wyfold.runtime import kernel_configs, triton_support
from wyfold.runtime.kernel_configs import Config, LaunchKey

CPU = torch.device("cpu")
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


@pytest.fixture
def rows(monkeypatch):
    """Replace every architecture's table by the given one."""

    def replace(table: dict[str, dict[str, dict[str, int]]]) -> None:
        monkeypatch.setattr(triton_support, "config_text", lambda name: json.dumps(table if name == "default" else {}))
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
        return kernel_configs.tuned("scan.triton", LaunchKey.parse(key), CPU).warps

    assert warps("bf16 K128 V128 C64 none WF") == 1
    assert warps("fp32 K128 V128 C64 none WF") == 2
    assert warps("fp32 K136 V8 C64 none WF") == warps("fp32 K256 V8 C64 none WF") == 3
    assert warps("fp32 K200 V8 C64 none WF") == 4
    exact = kernel_configs.tuned("scan.triton", LaunchKey.parse("bf16 K128 V128 C64 scalar WF"), CPU)
    assert exact == Config(5, 3, {"BV": 64}, 168)
    assert exact.options() == {"num_warps": 5, "num_stages": 3, "enable_fp_fusion": True, "maxnreg": 168}
    assert "maxnreg" not in kernel_configs.tuned("scan.triton", LaunchKey(dtype="bf16"), CPU).options()


def test_of_two_rows_with_as_many_fields_the_order_of_the_file_does_not_matter(rows):
    written = {"default": {"warps": 1, "stages": 1}, "C32 channel": {"warps": 2, "stages": 1}}
    written["fp32 C32"] = {"warps": 4, "stages": 1}
    for order in (written, dict(reversed(written.items()))):
        rows({"kkt.triton": order})
        kernel_configs._table.cache_clear(), kernel_configs.row.cache_clear()
        assert kernel_configs.tuned("kkt.triton", LaunchKey.parse("fp32 K64 C32 channel"), CPU).warps == 2
        assert kernel_configs.tuned("kkt.triton", LaunchKey.parse("fp32 K64 C32 none"), CPU).warps == 4


def test_an_architecture_s_own_rows_replace_and_extend_the_defaults(monkeypatch):
    files = {
        "default": {"scan.triton": {"default": {"warps": 1, "stages": 1}, "fp32": {"warps": 2, "stages": 1}}},
        "sm_90": {"scan.triton": {"fp32": {"warps": 4, "stages": 1}, "bf16": {"warps": 8, "stages": 1}}},
    }
    monkeypatch.setattr(triton_support, "config_text", lambda name: json.dumps(files[name]))
    found = kernel_configs.shipped("sm_90")["scan.triton"]
    assert {name: row["warps"] for name, row in found.items()} == {"default": 1, "fp32": 4, "bf16": 8}


KEYS = [
    "default",
    "bf16 K128 V128 C64 scalar WF norm",
    "fp32 K16 V24 KV channel alone",
    "BK256 bwd",
    "W4 conv",
    "gather",
]


@pytest.mark.parametrize("words", KEYS)
def test_a_key_is_written_as_words_and_read_back(words: str):
    assert str(LaunchKey.parse(words)) == words


@pytest.mark.parametrize("words", ["K", "K128 K64", "scalar channel", "bf16 Kernel", "C64!", "fwd bwd"])
def test_words_that_are_no_key_are_refused(words: str):
    with pytest.raises(ValueError, match="launch key"):
        LaunchKey.parse(words)


@pytest.mark.parametrize("name", ["default", *ARCHITECTURES])
def test_every_row_is_written_as_its_key_is(name: str):
    for kernel, rows in kernel_configs.overrides(name).items():
        assert [str(LaunchKey.parse(words)) for words in rows] == [*rows], kernel


def test_an_architecture_s_file_has_only_rows_that_differ_from_the_defaults():
    defaults = kernel_configs.overrides("default")
    for name in ARCHITECTURES:
        for kernel, rows in kernel_configs.overrides(name).items():
            assert all(defaults.get(kernel, {}).get(words) != row for words, row in rows.items()), (name, kernel)


def test_occupancy_is_low_up_to_half_of_the_multiprocessors(monkeypatch):
    monkeypatch.setattr(kernel_configs, "processors", lambda device: 132)
    key = LaunchKey("bf16", C=64)
    assert kernel_configs.with_occupancy_hint(key, 66, CPU) == key._replace(low_occupancy=True)
    assert kernel_configs.with_occupancy_hint(key, 67, CPU) == key


@pytest.mark.parametrize("word, tile", [("K8", 16), ("V16", 16), ("K24", 32), ("V256", 256)])
def test_the_tile_of_a_width(word: str, tile: int):
    assert LaunchKey.parse(word).tile(f"B{word[0]}") == tile
    assert LaunchKey.parse(f"B{word[0]}{tile}").fits(LaunchKey.parse(word))
    assert not LaunchKey.parse(f"B{word[0]}{2 * tile}").fits(LaunchKey.parse(word))


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
    """But launches no Gluon kernel, which the card may not run."""
    assert kernel_configs.borrowed_from(architecture) == file
    assert kernel_configs.shipped(architecture) == kernel_configs.shipped(file)
    for row in kernel_configs.dispatch_table()["sm_90"]:
        key = LaunchKey.parse(row["key"])
        assert kernel_configs.dispatched(architecture, row["stage"], key) == (architecture == "sm_90"), row


def test_a_tuned_row_switches_no_backend_on():
    """Dispatch reads its own table. Each of its rows has a tuned row, and each row of a Gluon kernel is launched."""
    rows = kernel_configs.dispatch_table()["sm_90"]
    tuned = {kernel: rows for kernel, rows in kernel_configs.shipped("sm_90").items() if kernel.endswith(".gluon")}
    for row in rows:
        key = LaunchKey.parse(row["key"])
        assert any(LaunchKey.parse(words).fits(key) for words in tuned[f"{row['stage']}.gluon"]), row
    for kernel, found in tuned.items():
        stage = kernel.removesuffix(".gluon")
        assert all(kernel_configs.dispatched("sm_90", stage, LaunchKey.parse(words)) for words in found), kernel
    key, config = LaunchKey.parse("bf16 K32 V64 C64 scalar WF"), Config(4, 1)
    with kernel_configs.override_row("sm_90", "scan.gluon", str(key), config):
        assert not kernel_configs.dispatched("sm_90", "scan", key)


def test_a_row_serves_only_what_it_names():
    """A row without a launch fitted every launch, so the kernel of another rule was launched."""
    for row in kernel_configs.dispatch_table()["sm_90"]:
        key = LaunchKey.parse(row["key"])
        others = [key._replace(launch="other"), key._replace(kept=True), key._replace(wide=True)]
        others += [] if key.launch is None else [key._replace(launch=None)]
        assert not any(kernel_configs.dispatched("sm_90", row["stage"], other) for other in others), row


RESULTS = Path(__file__).resolve().parents[2] / "docs/results"
PROVED = [(row["stage"], row["proved"]) for row in kernel_configs.dispatch_table()["sm_90"] if "proved" in row]


@pytest.mark.parametrize("stage, proved", PROVED, ids=str)
def test_what_is_said_to_be_proved_is_in_the_stored_result(stage: str, proved: dict[str, str]):
    """The card, the toolchain, the commit, errors against the float64 loop, and the launch of the Gluon kernel."""
    record = json.loads((RESULTS / f"{proved['result']}.json").read_text())
    assert [gpu["name"] for gpu in record["hardware"]["gpus"]] == [proved["card"]]
    assert {name: record["versions"][name] for name in ("torch", "triton")} == {
        name: proved[name] for name in ("torch", "triton")
    }
    assert record["commit"] == proved["commit"] and not record["modified"]
    word = stage.removeprefix("segment_")  # results keep the name of their time
    ours = [row for row in record["rows"] if row["contender"] == "wyfold"]
    launches = [launch for row in ours for way in ("forward", "backward") for launch in row["launches"][way]]
    assert any(launch.startswith(f"{word} (") and launch.endswith(".gluon)") for launch in launches)
    assert all(row["errors"] for row in ours)


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
