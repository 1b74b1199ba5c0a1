"""`bench` checks results before it times them, interleaves implementations, and stores complete records."""

import dataclasses
import json
import math
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from tests import processes

import wyfold
from wyfold.cli import catalog, main
from wyfold.cli.bench import cases, implementations, memory, options, peers, runner, tables, tensors, timing
from wyfold.cli.bench.cases import Case
from wyfold.cli.bench.implementations import AccuracyCheck, BenchImplementation
from wyfold.cli.bench.peer import Adapter, Loaded, Peer
from wyfold.kernels.scan import eager as scan_stage
from wyfold.reference import targets
from wyfold.reference.shapes import Shape

CASE = Case("gdn", Shape(1, 40, 1, 2, 8, 8), "mid", "float32", "fwdbwd", 0)
PEAK = {"above_inputs_mib": 2.0, "process_mib": 300.0, "method": "a stand-in"}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on the CPU, also on machines with a GPU; test_bench_gpu.py tests the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the memory measurement in a child process."""
    monkeypatch.setattr(memory, "in_fresh_process", lambda request: PEAK)


def ours(case: Case = CASE) -> BenchImplementation:
    return implementations.implementations_of(case, [])[0]


def adapters(*found: tuple[str, Callable[..., torch.Tensor]], backward: bool = True) -> tuple[Adapter, ...]:
    """Adapters of an invented library, from (name, function) pairs."""
    return tuple(Adapter(lambda ran=ran, call=call: Loaded(ran, call), "", backward) for ran, call in found)


# --- the whole command -----------------------------------------------------------------------------------------------


def test_decoding_is_timed_from_states_to_states(no_children, tmp_path, monkeypatch):
    """Wyfold updates states in place; a peer's token form returns new ones. Neither has a backward here."""
    pool_of: list[int] = []
    decode = implementations.serving.decode

    def decoded(**given):
        pool_of.append(given["pool"].data_ptr())
        return decode(**given)

    monkeypatch.setattr(implementations.serving, "decode", decoded)
    case = dataclasses.replace(CASE, op="decode_kda", shape=Shape(3, 1, 1, 2, 8, 8), mode="fwd")
    arguments = case.arguments()
    states = arguments["initial_state"].clone()
    token = catalog.OPS[case.op]
    peer = Peer("made up", "torch", "", {token: adapters(("token form", peers._keywords(wyfold.fused_recurrent_kda)))})
    session = runner.BenchSession(1, 3, graph=False, cold=False)
    (rows,) = runner.run_cases([case], [peer], [], session)
    assert [row["ran"] for row in rows] == ["wyfold.serving.decode", "token form"]
    assert all(row["correct"] and row["milliseconds"] for row in rows)
    assert rows[0]["launches"]["forward"] == (
        "prepare (wyfold.kernels.prepare.eager)",
        "recurrent (wyfold.kernels.recurrent.eager)",
    )
    assert len(set(pool_of)) > 1, "what is checked is not what is timed"
    assert torch.equal(arguments["initial_state"], states)
    read = sum(x.nbytes for x in arguments.values() if isinstance(x, torch.Tensor))
    assert rows[0]["floor"]["bytes"] == read + arguments["v"].nbytes + states.nbytes
    both = dataclasses.replace(case, mode="fwdbwd")
    (rows,) = runner.run_cases([both], [], [], runner.BenchSession(1, 1, graph=False, cold=False))
    assert rows[0]["refused"] == "has no backward"


def test_a_record_has_provenance_errors_times_and_memory(tmp_path, capsys):
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
    shown = capsys.readouterr().out
    assert "median ms" in shown
    assert "peak MiB above inputs" in shown


def test_the_bounded_gate_is_that_of_a_bounded_layer():
    drawn = dataclasses.replace(CASE, op="kda", gate="bounded").arguments()
    assert drawn["lower_bound"] == tensors.LOWER_BOUND == -5.0 and not drawn["A_log"].any()
    assert list(cases.gates_of("gdn", ["mid", "bounded"])) == ["mid"]
    assert list(cases.gates_of("gla", ["mid", "bounded"])) == ["mid"]
    assert (
        AccuracyCheck(dataclasses.replace(CASE, op="kda", gate="bounded"), drawn)
        .check_call(ours(dataclasses.replace(CASE, op="kda", gate="bounded")), True, ours=True)
        .within_limits
    )


@pytest.mark.parametrize("op", ["gdn", "kda", "recurrent_kda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_gate_arguments_are_projections(op: str, dtype: str, no_children, tmp_path):
    """Gate and beta are projections in the tokens' dtype, and the gradients of gate parameters are checked."""
    words = f"bench {op} --shapes 1,40,1,2,8,8 --gates model --dtype {dtype} --mode fwdbwd --rounds 1 --peers none"
    assert main([*words.split(), "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.json")
    (row,) = json.loads(file.read_text())["rows"]
    assert row["gate"] == "model"
    assert {"dg", "dbeta", "dA_log", "ddt_bias"} < set(row["errors"])
    drawn = dataclasses.replace(CASE, op=op, gate="model", dtype=dtype).arguments()
    assert drawn["g"].dtype == drawn["beta"].dtype == drawn["q"].dtype
    assert drawn["use_gate_in_kernel"] and drawn["use_beta_sigmoid_in_kernel"]
    rates, steps = drawn["A_log"].exp(), torch.nn.functional.softplus(drawn["dt_bias"])
    assert rates.min() >= 1 and rates.max() <= 16
    assert steps.min() >= 0.999e-3 and steps.max() <= 0.1001


def test_parameters_are_sliced_to_checked_heads():
    """On a GPU some heads are checked: the rows of these heads, in arguments and gradients."""
    case = dataclasses.replace(CASE, op="kda", gate="model", shape=Shape(1, 40, 3, 6, 8, 8))
    arguments, group = case.arguments(), 2
    judge = AccuracyCheck(dataclasses.replace(case, device="cuda"), arguments, heads=1)
    for name in ("A_log", "dt_bias"):
        x = arguments[name]
        for of in (name, f"d{name}"):
            assert torch.equal(judge._compared_part(of, x, 1), x[:group])


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


def test_a_failed_child_leaves_a_row_without_memory(monkeypatch, capsys):
    def killed(request):
        raise RuntimeError("exit code -9: it said nothing")

    monkeypatch.setattr(memory, "in_fresh_process", killed)
    assert main("bench norm --shapes 1,20,1,8 --mode fwd --rounds 1".split()) == 0
    assert "no memory figure for norm by wyfold.rms_norm_gated: exit code -9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["gru"], "OP: unknown 'gru'; there are delta_rule, gdn, kda"),
        (["gdn", "--peers", "flax"], "--peers: unknown peer 'flax'; there are transformers, fla, flash-qla, cudnn"),
        (
            ["kda", "--peers", "fla:slow"],
            "--peers: fla has no variant 'slow'; there are generic, safe_gate, staged, fused",
        ),
        (["gdn", "--gates", "mid,odd"], "--gates: unknown 'odd'; there are fast, mid, slow, model, bounded"),
        (["gdn", "--suite", "groups", "--norm", "inside"], "--suite groups: decides --shapes, --gates, --norm"),
        (["gla", "--suite", "groups"], "--suite groups has no gla"),
        (["--suite", "groups", "--mode", "fwd"], "--mode; leave out --mode"),
        (["--suite", "all"], "argument --suite: invalid choice: 'all'"),
        (["decode_kda", "--gates", "bounded"], "--gates bounded: decoding is timed with decays that are given"),
        (["gdn", "--gates", "bounded"], "nothing to run: none of gdn has --gates bounded"),
        (["gdn", "--budget", "0"], "--budget: must be a whole number of at least 1"),
        (["gdn", "--resume", "/no/such/file"], "--resume: "),
        (["gdn", "decode_kda", "--gates", "model"], "--gates model: decoding is timed with decays that are given"),
        (
            ["gdn", "--dtype", "float32,float8"],
            "--dtype: unknown 'float8'; there are float32, float64, bfloat16, float16",
        ),
        (["gdn", "--mode", "bwd"], "--mode: unknown 'bwd'; there are fwd, fwdbwd, graph"),
        (["gdn", "--mode", "fwd,graph"], "--mode graph: CUDA graphs need a GPU, but the device is cpu"),
        (["gdn", "--also", "luck"], "--also: unknown 'luck'; there are disable_recompute, batch_invariant, safe_gate"),
        (["solve", "--chunk", "48"], "--chunk: unknown '48'; there are 16, 32, 64"),
        (["gdn", "--shapes", "1,2,3"], "--shapes: must be of h96, b4t4k, "),
        (["gdn", "--shapes", "h96,1"], "or B,T,H,K or B,T,H,HV,K or B,T,H,HV,K,V, whole numbers, got 'h96,1'"),
        (["gdn", "--rounds", "0"], "--rounds: must be a whole number of at least 1"),
        (["gdn", "--compile-budget", "9"], "--compile-budget: must come with --compile"),
        # It was found after all timing, when the result could not be written.
        (["gdn", "--label", "of/day"], "--label: must be a part of a file name, got 'of/day'"),
    ],
)
def test_invalid_options_are_named(words, shown, capsys):
    assert main(["bench", *words, "--device", "cpu"]) == 2
    assert shown in capsys.readouterr().err


def test_named_shapes_and_short_adds_dense():
    assert options._shapes("h96,qwen") == [("h96", ()), ("qwen", ())]
    assert tuple(cases.PINNED) == catalog.SHAPES and tuple(tensors.GATES) == catalog.DECAYS
    assert cases.PINNED["h96"] == Shape(1, 8192, 96, 96, 128, 128)
    assert cases.PINNED["qwen"] == Shape(1, 8192, 16, 32, 128, 128)
    assert [name for name, _ in options._shapes("short")] == ["short", "dense"]
    assert len(tensors.SHORT_LENGTHS) == 256
    assert min(tensors.SHORT_LENGTHS) >= 1
    assert max(tensors.SHORT_LENGTHS) <= 200
    assert cases.PINNED["short"].T == sum(tensors.SHORT_LENGTHS)
    assert cases.PINNED["mixed"].T == sum(tensors.packed_lengths("mixed"))
    assert not any(tensors.packed_lengths(name) for name in cases.PINNED if name not in ("short", "mixed"))


def test_a_group_of_cases_shares_tensors_and_gates_differ(monkeypatch, no_children, tmp_path):
    words = "bench gdn delta_rule kkt --shapes 1,20,1,8 --gates mid,slow --rounds 1 --chunk 16,32 --peers none --out"
    assert main([*words.split(), str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.json")
    ran = [(row["op"], row["gate"], row["mode"], row["chunk"]) for row in json.loads(file.read_text())["rows"]]
    assert ran == [
        *[("gdn", gate, mode, 64) for gate in ("mid", "slow") for mode in ("fwd", "fwdbwd")],
        *[("delta_rule", "none", mode, 64) for mode in ("fwd", "fwdbwd")],
        *[("kkt", gate, "fwd", chunk) for chunk in (16, 32) for gate in ("none", "mid", "slow")],
    ]


# --- peers -----------------------------------------------------------------------------------------------------------


def test_a_missing_peer_is_printed_and_others_run(no_children, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Peer, "installed", False)
    words = "bench gdn --shapes 1,20,1,8 --mode fwd --rounds 1 --device cpu --out".split()
    assert main([*words, str(tmp_path)]) == 0
    assert (
        'transformers: not installed; pip install ".[bench]" in a clone of Wyfold, or pip install'
        in capsys.readouterr().out
    )
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert set(record["peers"]) == set(peers.PEERS)
    assert record["peers"]["transformers"] == "not installed or not asked for"
    assert [row["contender"] for row in record["rows"]] == ["wyfold"]


def test_one_variant_of_a_peer_can_be_selected(monkeypatch):
    monkeypatch.setattr(Peer, "installed", True)
    (fla, cudnn) = options.chosen_peers("fla:safe_gate,cudnn", "cuda")
    assert [adapter.variant for adapter in fla.adapters["chunk_kda"]] == ["safe_gate"]
    assert fla.adapters["chunk_delta_rule"] == peers.PEERS["fla"].adapters["chunk_delta_rule"]
    assert cudnn is peers.PEERS["cudnn"]
    everyone = ["fla", "flash-qla", "cudnn", "flashinfer", "flash-kda", "attention-gym"]
    assert [peer.name for peer in options.chosen_peers("all", "cuda")] == everyone
    assert [peer.name for peer in options.chosen_peers("all", "cpu")] == ["transformers"]


def test_peers_run_on_the_same_tensors_and_are_checked(no_children, monkeypatch, tmp_path, capsys):
    """Invented libraries that run the token loop: accurate, less accurate than Wyfold may be, and wrong."""
    from wyfold import reference

    def loop(arguments, off):
        return off * reference.gated_delta_rule(**arguments)[0]

    for name, off in (("right", 1.0), ("coarse", 1.001), ("wrong", 1.05)):
        found = adapters((f"{name}.loop", lambda arguments, off=off: loop(arguments, off)))
        monkeypatch.setitem(peers.PEERS, name, Peer(name, name, "", {"chunk_gated_delta_rule": found}))
    monkeypatch.setattr(Peer, "installed", True)
    words = "bench gdn kda --shapes 1,40,1,8 --mode fwd --rounds 1 --peers right,coarse,wrong --out".split()
    assert main([*words, str(tmp_path)]) == 0  # the peer is wrong, not Wyfold
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    ran = [(row["op"], row["ran"], row["correct"], row["within_limits"]) for row in record["rows"]]
    assert ran == [
        ("gdn", "wyfold.chunk_gated_delta_rule", True, True),
        ("gdn", "right.loop", True, True),
        ("gdn", "coarse.loop", True, False),
        ("gdn", "wrong.loop", False, False),
        ("kda", "wyfold.chunk_kda", True, True),
    ]
    first, second, third, fourth, _ = record["rows"]
    assert [ratio["peer"] for ratio in record["ratios"]] == ["right.loop", "coarse.loop"]
    ratio = record["ratios"][0]
    assert ratio["times_faster"] == second["milliseconds"]["median"] / first["milliseconds"]["median"]
    assert ratio["memory_share"] == 1.0
    assert record["ratios"][1]["error_share"] == first["errors"]["o"]["rms"] / third["errors"]["o"]["rms"]
    assert fourth["milliseconds"] is None
    shown = capsys.readouterr().out
    assert "over Wyfold's limits: gdn 1,40,1,1,8,8 float32 fwd by coarse.loop: o 1.0e-03 (over in" in shown
    assert "wrong: gdn 1,40,1,1,8,8 float32 fwd by wrong.loop: o 5.0e-02" in shown


def test_a_failing_peer_has_a_row_and_the_run_continues(no_children, monkeypatch, tmp_path, capsys):
    def refuse(arguments):
        raise RuntimeError("shapes do not match\n" + "and the compiler says so at length " * 100)

    def lacking():
        raise ImportError("no module of that name")

    found = {
        "chunk_gated_delta_rule": adapters(("some.rule", refuse)),
        "chunk_kda": (Adapter(lacking), *adapters(("some.forward", refuse), backward=False)),
    }
    monkeypatch.setitem(peers.PEERS, "some", Peer("some", "some", "", found))
    monkeypatch.setattr(Peer, "installed", True)
    words = "bench gdn kda --shapes 1,40,1,8 --mode fwdbwd --rounds 1 --peers some --out".split()
    assert main([*words, str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "some.rule refused gdn 1,40,1,1,8,8 fwdbwd: RuntimeError: shapes do not match and the compiler" in shown
    assert "some (not loaded) refused kda 1,40,1,1,8,8 fwdbwd: ImportError: no module of that name" in shown
    assert "some.forward refused kda 1,40,1,1,8,8 fwdbwd: has no backward" in shown
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["correct"] for row in rows] == [True, False, True, False, False]
    assert all(len(row["refused"]) < 500 for row in rows)


def test_an_error_of_wyfold_has_a_row_and_fails_the_run(no_children, monkeypatch, tmp_path):
    def broken(*arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr(scan_stage, "scan", broken)
    words = "bench gdn norm --shapes 1,20,1,8 --mode fwd --rounds 1 --peers none --out".split()
    assert main([*words, str(tmp_path)]) == 1
    (file,) = tmp_path.glob("*.json")
    rows = {row["op"]: row for row in json.loads(file.read_text())["rows"]}
    assert (rows["gdn"]["refused"], rows["gdn"]["failed"]) == ("RuntimeError: a bug", True)
    assert rows["norm"]["correct"]


def test_an_unsupported_backend_is_a_refusal_not_a_failure(no_children, tmp_path, capsys):
    words = "bench norm --shapes 1,20,1,8 --mode fwd --rounds 1 --backend gluon --device cpu --out".split()
    assert main([*words, str(tmp_path)]) == 0
    assert "wyfold.rms_norm_gated refused norm 1,20,1,1,8,8 fwd: UnsupportedError" in capsys.readouterr().out


def test_adapters_pass_arguments_in_the_form_of_their_libraries(monkeypatch):
    """Each library is an invented module whose functions call Wyfold's operators."""
    import types

    import wyfold

    def delta(q, k, v, g=None, beta=None, **rest):
        rest.pop("safe_gate", None)
        rule = wyfold.chunk_delta_rule if g is None else wyfold.chunk_kda if g.ndim == 4 else wyfold.chunk_gdn
        return rule(q, k, v, *([] if g is None else [g]), beta, **rest)

    def packed(q, k, v, g, beta, cu_seqlens, use_qk_l2norm_in_kernel, plan_name=None, scale=None):
        assert q.ndim == 3
        assert cu_seqlens.dtype == torch.int32
        if plan_name is None:  # FlashInfer: the decay factor
            g = g.log()
        batch = [x[None] for x in (q, k, v, g, beta)]
        o, state = delta(*batch, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        return (o[0], state) if plan_name else o[0]

    def flash_kda(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, cu_seqlens=None):
        inside = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound, "use_gate_in_kernel": True}
        inside |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "cu_seqlens": cu_seqlens}
        out.copy_(wyfold.chunk_kda(q, k, v, g, beta, scale=scale, **inside)[0])

    def kkt(k, beta, g=None, chunk_size=64):
        decays = None
        if g is not None:  # cumulative sums within chunks, base 2
            parts = [torch.cat([part[:, :1], part.diff(dim=1)], 1) for part in g.split(chunk_size, dim=1)]
            decays = torch.cat(parts, 1) / math.log2(math.e)
        return wyfold.chunk_scaled_dot_kkt(k, beta, decays, chunk_size=chunk_size)

    def recurrent_gla(q, k, v, gk, **rest):
        return wyfold.fused_recurrent_gla(q, k, v, gk, **rest)

    made = {
        "fla.ops.delta_rule": {"chunk_delta_rule": delta, "fused_recurrent_delta_rule": delta},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": delta, "fused_recurrent_gated_delta_rule": delta},
        "fla.ops.kda": {"chunk_kda": delta, "fused_recurrent_kda": delta},
        "fla.ops.gated_delta_product": {"chunk_gated_delta_product": wyfold.chunk_gated_delta_product},
        "fla.ops.gla": {"chunk_gla": wyfold.chunk_gla, "fused_recurrent_gla": recurrent_gla},
        "fla.ops.generalized_delta_rule": {
            f"{form}_{rule}_delta_rule": getattr(wyfold, f"{form}_{rule}_delta_rule")
            for form in ("chunk", "fused_recurrent")
            for rule in ("dplr", "iplr")
        },
        **{
            f"fla.ops.{rule}": {
                f"{form}_{rule}": getattr(wyfold, f"{form}_{rule}") for form in ("chunk", "fused_recurrent")
            }
            for rule in ("rwkv7", "gdn2", "comba")
        },
        "fla.ops.path_attn": {"parallel_path_attn": wyfold.parallel_path_attn},
        "fla.ops.ttt": {
            "chunk_ttt_linear": wyfold.chunk_ttt_linear,
            "fused_chunk_ttt_linear": wyfold.chunk_ttt_linear,
        },
        "fla.ops.utils.solve_tril": {"solve_tril": wyfold.solve_tril},
        "fla.ops.common.chunk_scaled_dot_kkt": {"chunk_scaled_dot_kkt_fwd": kkt},
        "fla.modules.causal_conv1d": {"causal_conv1d": wyfold.causal_conv1d},
        "fla.modules.norm.fused_norm_gate": {"rms_norm_gated": wyfold.rms_norm_gated},
        "fla.modules.norm.l2norm": {"l2norm": wyfold.l2norm},
        "fla.ops.gated_delta_rule.gate": {"fused_gdn_gate": wyfold.fused_gdn_gate},
        "fla.ops.kda.gate": {"fused_kda_gate": wyfold.fused_kda_gate},
        "flash_qla": {"chunk_gated_delta_rule": delta},
        "attn_gym.linear": {"chunk_gdn": delta, "chunk_kda": delta},
        "flash_kda": {"fwd": flash_kda},
        "cudnn.linear_attention": {"kimi_delta_attention": packed},
        "flashinfer.gdn_prefill": {"chunk_gated_delta_rule": packed},
    }
    for name, functions in made.items():
        for i in range(1, name.count(".") + 2):
            package = ".".join(name.split(".")[:i])
            monkeypatch.setitem(sys.modules, package, sys.modules.get(package) or types.ModuleType(package))
        for function, does in functions.items():
            monkeypatch.setattr(sys.modules[name], function, does, raising=False)

    tried, inside = 0, "flash-kda"
    names = [name for name, peer in peers.PEERS.items() if peer.device == "cuda" and name != inside]
    for op in catalog.OPS:
        for gate in cases.gates_of(op, ["mid"]):
            case = Case(op, Shape(2, 40, 2, 2, 16, 16), gate, "float32", "fwd", 1, norm="outside", chunk=16)
            arguments = case.arguments()
            judge = AccuracyCheck(case, arguments)
            others = [peers.PEERS[name] for name in names]
            for implementation in implementations.implementations_of(case, others)[1:]:
                found = judge.check_call(implementation, False, ours=True)
                assert found.within_limits, (op, gate, implementation.ran, [str(verdict) for verdict in found.verdicts])
                tried += 1
    operators = [peers.PEERS[name].adapters for name in names]
    variants = [some for adapters in operators for of, some in adapters.items() if of in catalog.OPS.values()]
    # chunk_scaled_dot_kkt and parallel_path_attn with and without a gate; decoding for the token forms of six rules
    assert tried == sum(map(len, variants)) + 2 + 6

    case = Case("kda", Shape(2, 40, 2, 2, 16, 16), "bounded", "float32", "fwd", 1)
    judge = AccuracyCheck(case, case.arguments())
    found = implementations.implementations_of(case, [peers.PEERS[name] for name in (*names, inside)])[1:]
    right = {c.ran: judge.check_call(c, False, ours=True).within_limits for c in found if c.name in ("fla", inside)}
    assert len(right) == 3 and all(right.values()), right
    for other in (c for c in found if c.name not in ("fla", inside)):
        with pytest.raises(NotImplementedError, match="takes decays that are given, without an activation inside"):
            other(case.arguments())
    given = dataclasses.replace(case, gate="mid")
    (bounded_only,) = implementations.implementations_of(given, [peers.PEERS[inside]])[1:]
    with pytest.raises(NotImplementedError, match="--gates bounded --norm inside"):
        bounded_only(given.arguments())
    *_, gym = implementations.implementations_of(given, [peers.PEERS["attention-gym"]])
    with pytest.raises(NotImplementedError, match="--norm outside"):
        gym(given.arguments())


def test_imports_of_pytorchs_first_backward_are_not_timed():
    """PyTorch imports sympy. Runs in a new process, because this one has imported it."""
    code = """
import dataclasses, sys, torch
from wyfold.cli.bench import memory, runner
from wyfold.cli.bench.cases import Case
from wyfold.reference.shapes import Shape

case = Case("norm", Shape(1, 20, 1, 1, 8, 8), "none", "float32", "fwdbwd", 0)
memory.seconds = lambda call, finish: {"before": "sympy" in sys.modules, "call": call()}
request = dataclasses.asdict(case) | {"contender": "wyfold", "ran": "wyfold.rms_norm_gated", "threads": 1}
assert "sympy" not in sys.modules
assert runner.measure(request | {"what": "first call"})["before"]
"""
    done = processes.fresh().run(["-c", code])
    assert done.returncode == 0, done.stderr


def test_one_run_has_several_dtypes(no_children, tmp_path):
    words = "bench solve --shapes 1,64,1,8 --dtype float32,bfloat16 --chunk 16,64 --rounds 1 --peers none --out"
    assert main([*words.split(), str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert "--dtype float32,bfloat16" in record["command"]
    found = [(row["dtype"], row["chunk"]) for row in record["rows"]]
    assert found == [("float32", 16), ("float32", 64), ("bfloat16", 16), ("bfloat16", 64)]


def test_dispatch_messages_of_fla_are_recorded(monkeypatch):
    import logging

    monkeypatch.setattr(peers, "_dispatch_messages", {})
    peers._capture_dispatch_log()
    peers._capture_dispatch_log()
    logger = logging.getLogger("fla.backends")
    logger.info("[FLA Backend] common.chunk_bwd_dqkwg -> tilelang")
    assert peers.dispatch_messages() == ["[FLA Backend] common.chunk_bwd_dqkwg -> tilelang"]
    assert len([handler for handler in logger.handlers if isinstance(handler, peers._DispatchLogHandler)]) == 1


# --- its parts -------------------------------------------------------------------------------------------------------


def test_implementations_alternate_and_each_round_starts_with_another():
    round_order: list[str] = []
    runs = [lambda name=name: round_order.append(name) for name in "abc"]
    times = timing.interleaved(runs, 3)
    assert "".join(round_order) == "abc" + "abc" + "bca" + "cab"  # the first calls are warm-up runs
    assert [len(each) for each in times] == [3, 3, 3]


def test_acausal_results_are_wrong_also_outside_the_compared_outputs(monkeypatch):
    monkeypatch.setattr(implementations, "CHECKED", 20)
    monkeypatch.setattr(implementations, "CHECKED_FORWARD", 20)
    judge = AccuracyCheck(CASE, CASE.arguments())
    assert judge.check_call(ours(), True, ours=True).within_limits
    peeking = dataclasses.replace(ours(), call=lambda a: ours().call(a) + 1e-9 * a["v"].flip(1))
    found = judge.check_call(peeking, True, ours=True)
    assert {verdict.name for verdict in found.verdicts if not verdict.passed} == {"dv"}
    assert not found.correct


def test_path_attention_on_a_gpu_is_compared_over_its_first_tokens(monkeypatch):
    monkeypatch.setattr(implementations, "CHECKED_PATH", 40)
    monkeypatch.setattr(Case, "on_gpu", True)
    case = Case("path", Shape(1, 100, 2, 4, 16, 16), "mid", "bfloat16", "fwdbwd", 0)
    judge = AccuracyCheck(case, case.arguments(), heads=1)
    assert judge.method == "eager in float64; the first 40 tokens of key heads [0] of 2 and their value heads"
    found = judge.check_call(ours(case), True, ours=True)
    assert found.within_limits
    limits = {verdict.name: verdict.limits.rms for verdict in found.verdicts}
    assert limits["dw"] == targets.target("dw", torch.bfloat16, "path")  # a gradient in float32, of 16-bit operands
    peeking = dataclasses.replace(
        ours(case), call=lambda a: ours(case).call(a) + 1e-3 * a["v"].flip(1).repeat(1, 1, 2, 1)
    )
    assert not judge.check_call(peeking, True, ours=True).correct
    wrong = dataclasses.replace(ours(case), call=lambda a: 1.05 * ours(case).call(a))
    assert not judge.check_call(wrong, True, ours=True).within_limits


def test_step_sizes_are_compared_as_numbers_not_rows():
    """deta has one number per token; a small one may have a relative error above 1."""
    case = Case("ttt", Shape(1, 128, 1, 1, 8, 8), "none", "float32", "fwdbwd", 0)
    judge = AccuracyCheck(case, case.arguments())
    truth = torch.randn(1, 128, 1, 1, dtype=torch.float64)
    truth[0, 5] = 1e-9
    got = truth.float()
    got[0, 5] = 2e-9
    assert judge._verdict("deta", got, truth, None).passed
    got[0, :64] += truth[0, :64].float()
    assert not judge._verdict("deta", got, truth, None).passed


def test_one_wrong_row_among_many_is_wrong():
    """Its error is small relative to the tensor, but large relative to the row."""
    case = dataclasses.replace(CASE, shape=Shape(1, 4000, 1, 1, 8, 8), gate="slow", mode="fwd", dtype="bfloat16")
    judge = AccuracyCheck(dataclasses.replace(case, device="cpu"), case.arguments())
    judge.tokens = judge.output_tokens = 400

    def late(arguments):
        o = ours(case).call(arguments)
        o[:, 50] = o[:, 49]
        return o

    assert judge.check_call(ours(case), False, ours=True).within_limits
    found = judge.check_call(dataclasses.replace(ours(case), call=late), False, ours=False)
    assert found.verdicts[0].measured.rms < 0.1
    assert not found.correct


def test_wyfold_over_its_limit_is_timed_and_fails_the_run(no_children, monkeypatch, tmp_path, capsys):
    usual = implementations.judge
    monkeypatch.setattr(implementations, "judge", lambda *x, **names: usual(*x, **names | {"target": 6e-8}))
    words = "bench norm --shapes 1,20,1,8 --mode fwd --rounds 1 --out".split()
    assert main([*words, str(tmp_path)]) == 1
    (file,) = tmp_path.glob("*.json")
    (row,) = json.loads(file.read_text())["rows"]
    assert 6e-8 < row["worst_error"] < 12e-8
    assert (row["correct"], row["within_limits"], row["failed"]) == (True, False, True)
    assert row["milliseconds"]["median"] > 0
    assert "over Wyfold's limits: norm 1,20,1,1,8,8 float32 fwd by wyfold.rms_norm_gated" in (capsys.readouterr().out)


def test_slow_gates_use_the_targets_of_uniform_inputs():
    families = {
        (case.op, case.gate): case.family
        for op in ("gdn", "delta_rule", "ttt", "conv")
        for gate in cases.gates_of(op, ["fast", "slow"])
        for case in [dataclasses.replace(CASE, op=op, gate=gate)]
    }
    assert families == {
        ("gdn", "fast"): "random",
        ("gdn", "slow"): "uniform+",
        ("delta_rule", "none"): "uniform+",
        ("ttt", "none"): "ttt",
        ("conv", "none"): "random",
    }


class OnGpu(Case):
    """A case that is checked as on a GPU, with tensors on the CPU."""

    on_gpu = True


def test_on_a_gpu_some_heads_are_compared_and_others_must_be_finite():
    case = OnGpu("kda", Shape(1, 70, 8, 16, 8, 8), "mid", "bfloat16", "fwdbwd", 0, norm="outside")
    judge = AccuracyCheck(case, case.arguments(), heads=3)
    assert judge.checked_heads == [0, 4, 7]
    assert "key heads [0, 4, 7] of 8" in judge.method
    mine = implementations.implementations_of(case, [])[0]
    found = judge.check_call(mine, True, ours=True)
    assert found.within_limits
    assert {verdict.name for verdict in found.verdicts} == {"o", "dq", "dk", "dv", "dg", "dbeta"}
    assert not found.eager  # its time would be that of the reference, and this operator has absolute targets

    def spoiled(head, value):
        def call(arguments):
            o = mine.call(arguments).clone()
            o[:, 3, head] = value
            return o

        return judge.check_call(dataclasses.replace(mine, call=call), False, ours=True)

    assert spoiled(4, 0.0).correct  # a head that is not compared, and a finite number
    assert not spoiled(4, float("nan")).correct
    assert spoiled(4, float("nan")).nonfinite == ("o",)
    assert not spoiled(9, 0.0).correct  # value head 9 reads key head 4


@pytest.mark.parametrize("kind", [Case, OnGpu])
@pytest.mark.parametrize("op", ["gdp", "gla", *catalog.LOW_RANK, "path"])
def test_parts_of_every_rule_are_compared(op: str, kind: type[Case]):
    """On a CPU the first tokens, on a GPU some heads: w and b are tokens, but of TTT-Linear parameters."""
    on_gpu = kind is OnGpu
    (gate, *_) = cases.gates_of(op, ["mid"])
    case = kind(op, Shape(1, 24 if on_gpu else 210, 3, 6, 8, 16), gate, "float64", "fwdbwd", 0)
    check = AccuracyCheck(case, case.arguments(), heads=2)
    found = check.check_call(ours(case), True, ours=True)
    assert found.within_limits, [str(verdict) for verdict in found.verdicts]
    assert {verdict.name for verdict in found.verdicts} > {"o", "dq" if op != "rwkv7" else "dr", "dv"}
    part = check._arguments(check.tokens)
    rows = {"k": 2, "v": 2 if op == "path" else 4} if on_gpu else {"k": 3, "v": 3 if op == "path" else 6}
    assert {name: part[name].shape[2] for name in rows} == rows
    assert on_gpu or part["k"].shape[1] == implementations.CHECKED * case.updates


@pytest.mark.parametrize("kind", [Case, OnGpu])
@pytest.mark.parametrize("op", ["gdn", "kda", "ttt", "conv", "kkt"])
def test_the_packed_shape_is_packed_for_every_operator(kind, op, monkeypatch):
    monkeypatch.setattr(tensors, "SHORT_LENGTHS", (3, 40, 1, 26))
    monkeypatch.setattr(implementations, "CHECKED", 50)  # inside the last sequence
    gate = "mid" if op in ("gdn", "kda") else "none"
    mode = "fwd" if op == "kkt" else "fwdbwd"
    case = kind(op, Shape(1, 70, 2, 2, 8, 8), gate, "float32", mode, 0, name="short", norm="outside")
    judge = AccuracyCheck(case, case.arguments())
    mine = implementations.implementations_of(case, [])[0]
    assert judge.check_call(mine, case.backward, ours=True).within_limits
    dense = dataclasses.replace(mine, call=lambda a: mine.call({n: x for n, x in a.items() if n != "cu_seqlens"}))
    assert not judge.check_call(dense, False, ours=True).correct


class FakeGpu:
    """A fake GPU that uses the clock of the process. A call has two kernels, and a peer's call cannot be captured."""

    def __init__(self):
        self.captures = 0

    def copy_rate(self):
        return 4e12

    def interleaved(self, runs, rounds):
        return [timing.CallTimes(times, [time / 2 for time in times]) for times in timing.interleaved(runs, rounds)]

    def kernels(self, run):
        run()
        return [timing.Kernel("wyfold_scan_triton", 1.0, 0.25), timing.Kernel("wyfold_prepare_triton", 1.0, 0.125)]

    def captured(self, run):
        self.captures += 1
        if self.captures % 2 == 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return run

    def peak_mib(self, run):
        return 12.0


def test_a_gpu_row_has_every_measurement(monkeypatch, capsys):
    monkeypatch.setattr(timing, "Gpu", FakeGpu)
    monkeypatch.setattr(timing, "card", lambda: {"clocks.sm": "1980 MHz"})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    mine = ours(CASE)

    def failing(arguments):
        raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results")

    library = Peer(
        "some", "some", "", {"chunk_gated_delta_rule": adapters(("some.rule", mine.call), ("some.other", failing))}
    )
    first = OnGpu("gdn", Shape(1, 70, 2, 4, 8, 8), "mid", "bfloat16", "fwd", 0, norm="outside")
    session = runner.BenchSession(2, 4, graph=True, cold=False)
    both = dataclasses.replace(first, mode="fwdbwd")
    rows = [row for found in runner.run_cases([first, both], [library], [], session) for row in found]
    assert [(row["mode"], row["ran"], row["correct"]) for row in rows] == [
        (mode, ran, right)
        for mode in ("fwd", "fwdbwd")
        for ran, right in (("wyfold.chunk_gated_delta_rule", True), ("some.rule", True), ("some.other", False))
    ]
    row, peer, refused = rows[:3]
    assert row["kernels"][0] == {"name": "wyfold_scan_triton", "count": 1.0, "milliseconds": 0.25}
    assert row["kernel_milliseconds"] == 0.375
    assert row["floor"]["milliseconds"] == row["floor"]["bytes"] / 4e12 * 1e3
    assert row["times_floor"] == row["milliseconds"]["median"] / row["floor"]["milliseconds"]
    assert row["host_milliseconds"]["median"] == row["milliseconds"]["median"] / 2
    assert row["graph_milliseconds"]["rounds"] == 4
    assert row["peak"]["above_inputs_mib"] == 12.0
    assert row["card"] == {"clocks.sm": "1980 MHz"}
    assert set(row["errors"]) == {"o"}
    assert row["errors"]["o"]["rms"] > 0 and row["errors"]["o"]["eager"] is None
    assert peer["graph_milliseconds"] is None
    assert peer["graph_refused"] == "RuntimeError: operation not permitted when stream is capturing"
    assert refused["refused"].startswith("RuntimeError: Triton >= 3.4.0")
    assert refused["milliseconds"] is None
    tables.report(rows, tables.against_peers(rows))
    shown = capsys.readouterr().out
    assert "0.375 (2)" in shown
    assert "no graph of gdn 1,70,2,4,8,8 bfloat16 fwd by some.rule: RuntimeError: operation not permitted" in shown
    assert "some.other refused gdn 1,70,2,4,8,8 fwdbwd: RuntimeError: Triton >= 3.4.0" in shown


def test_a_failed_case_does_not_stop_others(no_children, monkeypatch, tmp_path, capsys):
    usual = runner.run_cases

    def one_lost(group, *rest):
        if group[0].op == "gdn":
            raise torch.OutOfMemoryError("no memory left")
        return usual(group, *rest)

    monkeypatch.setattr(runner, "run_cases", one_lost)
    words = "bench gdn norm --shapes 1,20,1,8 --mode fwd --rounds 1 --commit abc --out".split()
    assert main([*words, str(tmp_path)]) == 1
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert record["lost"] == [
        {"case": "gdn 1,20,1,1,8,8 fwd, mid gate, float32", "error": "OutOfMemoryError: no memory left"}
    ]
    assert [row["op"] for row in record["rows"]] == ["norm"]
    assert "not measured: gdn 1,20,1,1,8,8 fwd, mid gate, float32: OutOfMemoryError" in capsys.readouterr().out


def test_results_are_written_after_every_case(no_children, monkeypatch, tmp_path):
    usual, kept = runner.run_cases, []

    def cut_off(group, *rest):
        yield next(iter(usual(group, *rest)))
        (file,) = tmp_path.glob("*.json")
        kept.append(json.loads(file.read_text()))
        raise RuntimeError("the card fell over")

    monkeypatch.setattr(runner, "run_cases", cut_off)
    words = "bench gdn --shapes 1,20,1,8 --mode fwd,fwdbwd --rounds 1 --commit abc --out".split()
    assert main([*words, str(tmp_path)]) == 1
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert kept[0]["rows"] == record["rows"]
    assert {row["mode"] for row in record["rows"]} == {"fwd"}
    assert kept[0]["rows"][0]["milliseconds"]
    (lost,) = record["lost"]
    assert lost["error"] == "RuntimeError: the card fell over"
    assert "fwdbwd" in lost["case"]


def test_cases_after_a_failed_one_of_their_group_are_listed(no_children, monkeypatch, tmp_path):
    """Cases after a failed one share its tensors. The record must name them, or it would look complete."""

    def fell_over(group, *rest):
        raise RuntimeError("the card fell over")
        yield

    monkeypatch.setattr(runner, "run_cases", fell_over)
    words = "bench gdn --shapes 1,20,1,8 --mode fwd,fwdbwd --rounds 1 --commit abc --out".split()
    assert main([*words, str(tmp_path)]) == 1
    (file,) = tmp_path.glob("*.json")
    first, second = json.loads(file.read_text())["lost"]
    assert first["error"] == "RuntimeError: the card fell over"
    assert "fwdbwd" in second["case"] and second["error"] == f"not run after {first['case']}"


@pytest.mark.parametrize("modified, expected", [(None, "abc"), (True, "abc"), (False, "of git")], ids=str)
def test_commit_option_is_used_where_git_does_not_know(modified, expected, no_children, monkeypatch, tmp_path):
    """It does not hide that git found the sources changed."""
    found = None if modified is None else "of git"
    monkeypatch.setattr("wyfold.cli.results._commit", lambda: (found, modified))
    words = "bench norm --shapes 1,20,1,8 --mode fwd --rounds 1 --commit abc --out".split()
    assert main([*words, str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert (record["commit"], record["modified"]) == (expected, modified)


def test_byte_floor_counts_reads_and_writes():
    """Bytes per token and value head as documented: GDN 1,032 forward, 3,864 with backward; KDA 1,540."""
    shape = Shape(1, 128, 2, 2, 128, 128)
    for op, mode, expected in [
        ("gdn", "fwd", 1032),
        ("gdn", "fwdbwd", 3864),
        ("kda", "fwd", 1540),
        ("delta_rule", "fwd", 1028),
    ]:
        case = Case(op, shape, "none" if op == "delta_rule" else "mid", "bfloat16", mode, 0)
        arguments = case.arguments()
        assert case.floor_bytes(arguments) == expected * case.token_heads, (op, mode)


def test_byte_floor_of_kkt_counts_its_output():
    """docs/log/operators.md: 0.141 ms at 4.3 TB/s for float32 keys of B1 T8192 H96, here a 64th of it."""
    case = Case("kkt", Shape(1, 128, 96, 96, 128, 128), "none", "float32", "fwd", 0)
    assert case.floor_bytes(case.arguments()) == 128 * 96 * (128 * 4 + 4 + 64 * 4)


def test_flags_are_timed_only_where_they_apply():
    kda = dataclasses.replace(CASE, op="kda")
    names = [c.ran for c in implementations.implementations_of(kda, [], ["disable_recompute", "safe_gate"])]
    assert names == ["wyfold.chunk_kda", "wyfold.chunk_kda, disable_recompute", "wyfold.chunk_kda, safe_gate"]
    forward = dataclasses.replace(CASE, mode="fwd")
    assert len(implementations.implementations_of(forward, [], ["disable_recompute", "safe_gate"])) == 1
    whole = implementations.implementations_of(forward, [], ["batch_invariant"])[1]
    assert whole.ran == "wyfold.chunk_gated_delta_rule, batch_invariant"


def test_the_packed_shape_is_compared_with_the_dense_one_per_token():
    row = {
        "op": "gdn", "shape": {}, "gate": "mid", "dtype": "bfloat16", "gate_dtype": "float32", "norm": "outside",
        "chunk": 64, "mode": "fwd", "seed": 0, "contender": "wyfold", "ran": "wyfold.chunk_gated_delta_rule",
        "milliseconds": {"median": 1.0}, "graph_milliseconds": None, "peak": None, "errors": {},
    }  # fmt: skip
    rows = [row | {"name": "short", "ns_per_token_head": 3.0}, row | {"name": "dense", "ns_per_token_head": 2.0}]
    (ratio,) = tables.against_peers(rows)
    assert (ratio["peer"], ratio["times_faster"]) == ("dense, per token", 2.0 / 3.0)


def test_a_first_call_is_measured_with_empty_caches(monkeypatch, tmp_path):
    """The home directory of the child is empty, and all caches are in it."""
    words = "bench norm --shapes 1,20,1,8 --mode fwd --rounds 1 --peers none --cold --device cpu --out".split()
    monkeypatch.setattr(memory, "in_fresh_process", lambda request: PEAK)
    assert main([*words, str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.json")
    (row,) = json.loads(file.read_text())["rows"]
    assert 0 < row["first_call_seconds"] < 60
    asked = []
    monkeypatch.setattr(memory, "_request", lambda prefix, request: asked.append((prefix, request)) or {"seconds": 1.0})
    memory.first_call({"op": "norm"})
    (prefix, request) = asked[0]
    assert prefix[0] == "env"
    homes = {word.partition("=")[0]: word.partition("=")[2] for word in prefix[1:]}
    assert homes["TRITON_CACHE_DIR"].startswith(homes["HOME"])
    assert request == {"op": "norm", "what": "first call"}


@pytest.mark.parametrize("mode, before", [("fwd", 0), ("fwdbwd", 1)])
def test_a_first_call_excludes_imports_of_pytorch(mode: str, before: int, monkeypatch):
    """An unrelated backward runs before a first call with backward."""
    seen, usual = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: seen.append("grad") or usual(*a, **k))
    monkeypatch.setattr(memory, "seconds", lambda call, finish: {"seconds": float(seen.count("grad"))})
    case = dataclasses.replace(CASE, mode=mode)
    (first, *_) = implementations.implementations_of(case, [], [])
    request = {**dataclasses.asdict(case), "ran": first.ran, "contender": first.name, "what": "first call"}
    request["threads"] = torch.get_num_threads()
    assert runner.measure(request)["seconds"] == before


def test_both_forms_get_the_same_tensors():
    chunk, recurrent = CASE.arguments(), dataclasses.replace(CASE, op="recurrent_gdn").arguments()
    assert set(chunk) == set(recurrent)
    assert all(torch.equal(x, recurrent[name]) for name, x in chunk.items() if isinstance(x, torch.Tensor))


def test_gates_have_the_means_of_their_names():
    means = {}
    for gate in tensors.GATES:
        g = dataclasses.replace(CASE, gate=gate, shape=Shape(1, 2000, 1, 2, 8, 8)).arguments()["g"]
        assert g.max() <= 0
        assert g.min() >= -5
        means[gate] = g.mean().item()
    assert -2.6 < means["fast"] < -2.4
    assert -1 < means["mid"] < -0.7
    assert -1.1e-3 < means["slow"] < -0.9e-3


def test_peak_memory_counts_live_allocations():
    """64 MiB, allocated and freed twice; in a new process."""
    code = """
        import json, torch
        from wyfold.cli.bench import memory
        def call():
            for _ in range(2):
                x = torch.ones(16, 2**20)
                del x
        print(json.dumps(memory.peak(lambda: None, call)))
    """
    done = processes.fresh().run(["-c", textwrap.dedent(code)])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 60 <= found["above_inputs_mib"] <= 80
    assert found["process_mib"] > found["above_inputs_mib"]
