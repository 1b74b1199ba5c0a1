"""bench checks before it times, lets contenders take turns, and keeps everything a number needs."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from wyfold.cli import bench, contenders, main, memory, peers
from wyfold.cli.contenders import Case, Contender
from wyfold.reference.shapes import Shape
from wyfold.stages.scan import eager as scan_stage

CASE = Case("gdn", Shape(1, 40, 1, 2, 8, 8), "mid", "float32", "fwdbwd", 0)
PEAK = {"above_inputs_mib": 2.0, "process_mib": 300.0, "method": "a stand-in"}


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not what the test is about."""
    monkeypatch.setattr(memory, "in_fresh_process", lambda request: PEAK)


def ours(case: Case = CASE) -> Contender:
    return contenders.contenders(case.op, [])[0]


# --- the whole command -----------------------------------------------------------------------------------------------


def test_a_run_keeps_everything_a_number_needs(tmp_path, capsys):
    words = "bench gdn --shapes 1,40,1,2,8,16 --gates slow --mode fwdbwd --rounds 3 --peers none --seed 2".split()
    assert main([*words, "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("cpu-*-bench-gdn-T40.json")
    record = json.loads(file.read_text())
    assert {"date", "command", "hardware", "versions", "commit", "modified", "threads", "peers", "method"} <= set(
        record
    )
    (row,) = record["rows"]
    assert (row["op"], row["gate"], row["dtype"], row["mode"], row["seed"]) == ("gdn", "slow", "float32", "fwdbwd", 2)
    assert row["shape"] == {"B": 1, "T": 40, "H": 1, "HV": 2, "K": 8, "V": 16}
    assert row["ran"] == "wyfold.chunk_gated_delta_rule"
    assert row["launches"]["backend"] == "eager"
    assert set(row["errors"]) == {"o", "dq", "dk", "dv", "dg", "dbeta"}
    assert all(0 < error["rms"] <= error["limit"] for error in row["errors"].values())
    times = row["milliseconds"]
    assert times["rounds"] == 3
    assert 0 < times["least"] <= times["quartile1"] <= times["median"] <= times["quartile3"] <= times["most"]
    assert row["ns_per_token_head"] == times["median"] * 1e6 / 80
    assert row["peak"]["process_mib"] > row["peak"]["above_inputs_mib"] >= 0
    assert row["peak"]["method"] == memory.METHOD
    assert (tmp_path / f"{file.stem}.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "median ms" in said
    assert "peak MiB above inputs" in said


def test_the_command_in_the_record_repeats_the_run(no_children, tmp_path):
    assert main(["bench", "solve", "norm", "--shapes", "1,20,1,8", "--rounds", "1", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.json")
    first = json.loads(file.read_text())
    again = tmp_path / "again"
    assert main([*first["command"].split()[1:], "--out", str(again)]) == 0
    second = json.loads((again / file.name).read_text())
    assert second["command"] == first["command"]
    assert [row["errors"] for row in second["rows"]] == [row["errors"] for row in first["rows"]]


def test_a_wrong_result_has_no_time(no_children, monkeypatch, tmp_path, capsys):
    usual = scan_stage.scan

    def planted(inputs, factors, S, table, scale, out, leaving):
        left = usual(inputs, factors, S, table, scale, out, leaving)
        out[:, 5] *= 1.01
        return left

    monkeypatch.setattr(scan_stage, "scan", planted)
    words = "bench gdn conv --shapes 1,40,1,8 --mode fwd --rounds 1 --peers none --out".split()
    assert main([*words, str(tmp_path)]) == 1
    (file,) = tmp_path.glob("*.json")
    rows = {row["op"]: row for row in json.loads(file.read_text())["rows"]}
    assert not rows["gdn"]["correct"]
    assert rows["gdn"]["errors"]["o"]["reason"]
    assert (rows["gdn"]["milliseconds"], rows["gdn"]["ns_per_token_head"], rows["gdn"]["peak"]) == (None, None, None)
    assert rows["conv"]["milliseconds"]["median"] > 0
    assert "  wrong" in capsys.readouterr().out


def test_a_child_that_dies_leaves_a_row_without_memory(monkeypatch, capsys):
    def killed(request):
        raise RuntimeError("exit code -9: it said nothing")

    monkeypatch.setattr(memory, "in_fresh_process", killed)
    assert main("bench norm --shapes 1,20,1,8 --mode fwd --rounds 1".split()) == 0
    assert "no memory figure for norm by wyfold.rms_norm_gated: exit code -9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gru"], "OP: unknown 'gru'; there are delta_rule, gdn, kda"),
        (["gdn", "--peers", "flax"], "--peers: unknown peer 'flax'; there are transformers"),
        (["gdn", "--gates", "mid,odd"], "gates: unknown 'odd'; there are fast, mid, slow"),
        (["gdn", "--mode", "bwd"], "mode: unknown 'bwd'; there are fwd, fwdbwd"),
        (["gdn", "--shapes", "1,2,3"], "--shapes: must be B,T,H,K or B,T,H,HV,K or B,T,H,HV,K,V"),
        (["gdn", "--shapes", "1,2,3,x"], "--shapes: must be B,T,H,K"),
        (["gdn", "--rounds", "0"], "--rounds: must be a whole number of at least 1"),
    ],
)
def test_a_wrong_word_is_named(words, said, capsys):
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


# --- peers -----------------------------------------------------------------------------------------------------------


def test_a_missing_peer_is_printed_and_the_rest_runs(no_children, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers.Peer, "installed", False)
    words = "bench gdn --shapes 1,20,1,8 --mode fwd --rounds 1 --out".split()
    assert main([*words, str(tmp_path)]) == 0
    assert 'transformers: not installed; pip install "wyfold[bench]"' in capsys.readouterr().out
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert record["peers"] == {"transformers": "not installed"}
    assert [row["contender"] for row in record["rows"]] == ["wyfold"]


def test_a_peer_runs_on_our_tensors_and_is_held_to_our_limits(no_children, monkeypatch, tmp_path):
    """A stand-in for a library: our own token loop, once right and once a little off."""
    from wyfold import reference

    def loop(q, k, v, g, beta, off=1.0):
        return off * reference.gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]

    for name, off in (("right", 1.0), ("wrong", 1.001)):
        adapter = lambda name=name, off=off: (f"{name}.loop", lambda *tensors: loop(*tensors, off=off))
        peer = peers.Peer(name, "", {"chunk_gated_delta_rule": adapter})
        monkeypatch.setitem(peers.PEERS, name, peer)
    monkeypatch.setattr(peers.Peer, "installed", True)
    words = "bench gdn kda --shapes 1,40,1,8 --mode fwd --rounds 1 --peers right,wrong --out".split()
    assert main([*words, str(tmp_path)]) == 0  # theirs is wrong, not ours
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    ran = [(row["op"], row["ran"], row["correct"]) for row in record["rows"]]
    assert ran == [
        ("gdn", "wyfold.chunk_gated_delta_rule", True),
        ("gdn", "right.loop", True),
        ("gdn", "wrong.loop", False),
        ("kda", "wyfold.chunk_kda", True),
    ]
    (ratio,) = record["ratios"]
    first, second = record["rows"][:2]
    assert ratio["peer"] == "right.loop"
    assert ratio["times_faster"] == second["milliseconds"]["median"] / first["milliseconds"]["median"]
    assert ratio["memory_share"] == 1.0


def test_a_peer_that_refuses_has_a_row_and_stops_nothing(no_children, monkeypatch, capsys):
    def refuse(q, k, v, g, beta):
        raise RuntimeError("shapes do not match")

    def lacking():
        raise ImportError("no module of that name")

    adapters = {"chunk_gated_delta_rule": lambda: ("some.rule", refuse), "chunk_kda": lacking}
    monkeypatch.setitem(peers.PEERS, "some", peers.Peer("some", "", adapters))
    monkeypatch.setattr(peers.Peer, "installed", True)
    assert main("bench gdn kda --shapes 1,40,1,8 --mode fwd --rounds 1 --peers some".split()) == 0
    said = capsys.readouterr()
    assert "some.rule refused gdn: RuntimeError: shapes do not match" in said.out
    assert "some is installed, but not with this operator: no module of that name" in said.err


# --- its parts -------------------------------------------------------------------------------------------------------


def test_contenders_take_turns_and_each_round_starts_with_another():
    order: list[str] = []
    runs = [lambda name=name: order.append(name) for name in "abc"]
    times = bench.interleaved(runs, 3)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"  # the first are the warm runs
    assert [len(each) for each in times] == [3, 3, 3]


def test_a_look_at_the_future_is_wrong_even_where_the_outputs_are_not_compared(monkeypatch):
    monkeypatch.setattr(contenders, "CHECKED", 20)
    monkeypatch.setattr(contenders, "CHECKED_FORWARD", 20)
    arguments = CASE.arguments()
    assert all(verdict.passed for verdict in contenders.errors(ours(), CASE, arguments))
    peeking = dataclasses.replace(ours(), call=lambda a: ours().call(a) + 1e-9 * a["v"].flip(1))
    failed = {verdict.name for verdict in contenders.errors(peeking, CASE, arguments) if not verdict.passed}
    assert failed == {"dv"}


def test_both_forms_get_the_same_tensors():
    chunk, recurrent = CASE.arguments(), dataclasses.replace(CASE, op="recurrent_gdn").arguments()
    assert set(chunk) == set(recurrent)
    assert all(torch.equal(x, recurrent[name]) for name, x in chunk.items() if isinstance(x, torch.Tensor))


def test_gates_have_the_means_of_their_names():
    means = {}
    for gate in bench.GATES:
        g = dataclasses.replace(CASE, gate=gate, shape=Shape(1, 2000, 1, 2, 8, 8)).arguments()["g"]
        assert g.max() <= 0
        assert g.min() >= -5
        means[gate] = g.mean().item()
    assert -2.6 < means["fast"] < -2.4
    assert -1 < means["mid"] < -0.7
    assert -1.1e-3 < means["slow"] < -0.9e-3


def test_peak_memory_counts_what_a_call_holds_at_once():
    """64 MiB at once, twice in a row; in a process that has nothing else to do."""
    code = """
        import json, torch
        from wyfold.cli import memory
        def call():
            for _ in range(2):
                x = torch.ones(16, 2**20)
                del x
        print(json.dumps(memory.peak(lambda: None, call)))
    """
    import textwrap

    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert 60 <= found["above_inputs_mib"] <= 80
    assert found["process_mib"] > found["above_inputs_mib"]
