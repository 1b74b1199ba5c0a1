"""One buffer of tokens over the GPUs of a host: errors, gradients, losses, scaling and failures, compared with one GPU.

    PYTHONPATH=src:. python tools/proofs/ranks.py --commit HASH --out DIR [--ranks N] [--only PARTS] [--peers FOLDER]

Each of these lists of parts ends within 200 s on four GPUs:

    --only errors     --only ttt,conv,layers     --only mismatch,death     --only train     --only scaling
    --only peers      (each side of a comparison has its own time limit)

The program starts its ranks itself, over NCCL and one per GPU, with a shared kernel cache. The parts errors (delta
rules), ttt, conv, layers (every parameter's gradient), mismatch, death and train run in parallel, since they compile.
Scaling, and the operators beside fla's own context parallelism, run alone afterwards. Without GPUs everything is tiny
and over gloo, which only tests this file.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib.util
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ledger import Add, Job, Ledger, add_arguments, job_command, row_writer, run_parallel
from torch import Tensor, nn

import wyfold
from wyfold import SequenceLayout, layers
from wyfold.autograd import workspace
from wyfold.cli import main as wyfold_main
from wyfold.cli.operators import PER_TOKEN, bound, incoming, measured, widened
from wyfold.context_parallel import collectives
from wyfold.cp import ContextParallel, Watch, build_cp_context
from wyfold.models import Decoder, DecoderConfig
from wyfold.reference import inputs
from wyfold.reference.error import Verdict, judge, rms
from wyfold.reference.rounded import chunked
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target
from wyfold.runtime import segment_rule

CARDS = torch.cuda.device_count()
TINY = CARDS == 0
HOST = torch.device("cpu")
BF16 = torch.bfloat16
D = 16 if TINY else 128
TOKENS = 300 if TINY else 3000

LAYOUTS = ("contiguous", "zigzag")
GATED = {"delta_rule": None, "gated_delta_rule": "model", "kda": "model"}
PARAMETERS = ("A_log", "dt_bias", "w", "b", "weight", "bias")
STARTING, ENDING = ("initial_state", "initial_state_bias", "dh0", "dc0", "dinitial_state"), ("state", "state_bias")
FEW = 64
"""Number of elements, as of a gate parameter's gradient, below which an error varies by chance."""
FEW_FACTOR = 3.0
"""Largest error of so few elements, relative to the error of one GPU."""
TIMEOUT_S, NOTICED_S = 30, 60
DEATHS = ("host", "backward", "train")
STUCK_S, DEATH_LIMIT_S = 110, 140
LIVED_STEPS = 5
TAIL = 40
"""Lines of a survivor's log that are kept: the stacks of all its threads if it hung."""
LOSSES = 0.005
STEPS, BATCH = (4, 1) if TINY else (200, 16)
SCALED = {(4, "gdn", 262144): 3.2, (4, "gdn", 1048576): 3.6, (4, "kda", 1048576): 3.6}
"""(GPUs, layer, tokens) -> least speedup; for others the speedup is reported only."""
WARM = 5
"""Calls before a timed one: recordings and the allocator's blocks exist from the third call on."""
MEMORY = 1.12
"""Largest peak memory of a rank without weights, relative to its share of one GPU's."""

Arguments = dict[str, Any]
Named = dict[str, Tensor]


class Place:
    """This process's place among the ranks.

    Attributes:
        rank, world: Its number, and the number of ranks.
        device: Device of this rank's tensors.
    """

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = HOST if TINY else torch.device("cuda", self.rank)

    def join(self, timeout_s: float = 120) -> None:
        """Join the process group."""
        if TINY:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
            return
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", timeout=timedelta(seconds=timeout_s), device_id=self.device)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def on(self, arguments: Arguments) -> Arguments:
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in arguments.items()}

    def wait(self) -> None:
        if not TINY:
            torch.cuda.synchronize()


def packing(seed: int, tokens: int) -> list[int]:
    """Boundaries of sequences in a buffer of `tokens` tokens: long, short and empty sequences, and padding rows."""
    draw = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(draw.choice([0, 1, 2, 63, 64, 200, tokens // 3, tokens]))
    return [0, *(min(tokens - 5, end) for end in itertools.accumulate(lengths))]


# --- operators -------------------------------------------------------------------------------------------------------


def shared(context: ContextParallel, name: str, x: Any) -> Any:
    """This rank's share of an argument or of an incoming gradient."""
    if not isinstance(x, Tensor) or name in PARAMETERS:
        return x
    if name in STARTING or name in ENDING:
        return x[list(context.starts if name in STARTING else context.ends)]
    return context.shard(x).contiguous()


def joined(context: ContextParallel, name: str, x: Tensor, count: int) -> Tensor:
    """The results of all ranks as one process would have them: all sequences' states, all tokens, sums over ranks."""
    if name.removeprefix("d") in PARAMETERS:
        total = x.float()
    elif name in STARTING or name in ENDING:
        total = x.new_zeros(count, *x.shape[1:])
        total[list(context.ends if name in ENDING else context.starts)] = x
    else:
        with torch.no_grad():
            return context.unshard(x)
    dist.all_reduce(total)
    return total


def across(place: Place, op: Callable[..., Any], a: Arguments, fed: Named, boundaries: list[int], layout: str) -> Named:
    """A call over the ranks whose results are assembled on all of them."""
    context = build_cp_context(torch.tensor(boundaries), dist.group.WORLD, total_tokens=a["T"], layout=layout)
    mine = {name: shared(context, name, x) for name, x in a.items() if name != "T"}
    arrows = {name: shared(context, name, x) for name, x in fed.items()}
    got = measured(lambda x: op(**x, cp_context=context), place.on(mine), tuple(fed), fed=place.on(arrows))
    return {name: joined(context, name, x, len(boundaries) - 1) for name, x in got.items()}


def add_verdicts(add: Add, part: str, case: str, verdicts: Sequence[Verdict], alone: Named, truth: Named) -> None:
    add(
        part,
        case,
        all(verdict.passed for verdict in verdicts),
        rms={verdict.name: verdict.measured.rms for verdict in verdicts},
        one_gpu={name: rms(x.cpu(), truth[name]) for name, x in alone.items()},
        limit={verdict.name: verdict.limits.rms for verdict in verdicts},
        over={verdict.name: verdict.reason for verdict in verdicts if not verdict.passed},
    )


def errors(add: Add, place: Place, rule: str, layout: str) -> None:
    """A delta rule over random packings with all options, against float64; the yardstick is that of tests/accuracy."""
    op = getattr(wyfold, f"chunk_{rule}")
    for seed in range(1, 1 + (1 if TINY else 2) * place.world):
        boundaries = packing(seed, TOKENS)
        N = len(boundaries) - 1
        shape = Shape(1, TOKENS, 2, 4, D, D)
        drawn = {"gate": GATED[rule], "beta": "logits", "state": "normal", "sequences": N, "dtype": BF16, "seed": seed}
        a: Arguments = inputs.draw("random", rule, shape, **drawn)
        a |= {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "chunk_size": 16 if TINY else 64}
        fed = incoming({"o": a["v"], "state": a["initial_state"]}, seed)
        got = across(place, op, a | {"T": TOKENS}, fed, boundaries, layout)
        if seed % place.world != place.rank:
            continue  # the ranks share the judging
        a["cu_seqlens"] = torch.tensor(boundaries)
        alone = measured(lambda x: op(**x), place.on(a), tuple(fed), fed=place.on(fed))
        eager = a | {"backend": "eager"}
        truth = measured(lambda x: op(**x), widened(eager), tuple(fed), fed={k: x.double() for k, x in fed.items()})
        yardstick = measured(lambda x: chunked(**x), a, tuple(fed), fed=fed)
        verdicts = []
        for name, x in got.items():
            few = truth[name].numel() < FEW
            beside, limit = (None, target(name, BF16)) if few else (yardstick[name], None)
            per_token = PER_TOKEN.get(name) == x.ndim
            verdicts.append(judge(x.cpu(), truth[name], beside, name=name, target=limit, per_token=per_token))
        add_verdicts(add, "errors", f"{rule}, {layout}, packing {seed}: {N} sequences", verdicts, alone, truth)


def ttt(add: Add, place: Place, layout: str) -> None:
    """TTT-Linear, whose state is passed from rank to rank; ranks own whole mini-batches."""
    units, width = (12 * place.world, 8) if TINY else (48 * place.world, 64)
    T = 16 * units
    for seed in (1, 2):
        boundaries = [16 * (end // 16) for end in packing(seed, T)]
        boundaries[-1] = T - 5  # a short last mini-batch
        N = len(boundaries) - 1
        a: Arguments = inputs.draw(
            "random", "ttt_linear", Shape(1, T, 2, 4, width, width), state="normal", sequences=N, dtype=BF16, seed=seed
        )
        a["output_final_state"] = True
        names = ("o", "state", "state_bias")
        fed = incoming(dict(zip(names, (a["v"], a["initial_state"], a["initial_state_bias"]))), seed)
        got = across(place, wyfold.chunk_ttt_linear, a | {"T": T}, fed, boundaries, layout)
        if seed % place.world != place.rank:
            continue
        a["cu_seqlens"] = torch.tensor(boundaries)
        alone = measured(lambda x: wyfold.chunk_ttt_linear(**x), place.on(a), names, fed=place.on(fed))
        exact = {name: x.double() for name, x in fed.items()}
        eager = widened(a | {"backend": "eager"})
        truth = measured(lambda x: wyfold.chunk_ttt_linear(**x), eager, names, fed=exact)
        limits = {name: bound(name, BF16, "ttt") or bound(name, torch.float32) for name in got}
        per_token = {"deta": True}
        verdicts = [
            judge(
                x.cpu().squeeze(-1) if name in per_token else x.cpu(),
                truth[name].squeeze(-1) if name in per_token else truth[name],
                name=name,
                target=limits[name],
                per_token=name in per_token,
            )
            for name, x in got.items()
        ]
        add_verdicts(add, "ttt", f"{layout}, packing {seed}: {N} sequences", verdicts, alone, truth)


def conv(add: Add, place: Place, layout: str) -> None:
    """The short convolution's halo with all options; the yardstick is the eager backend in bfloat16."""
    for W, activation in ((4, "silu"), (4, None), (2, "silu")):
        boundaries, channels = packing(W, TOKENS), 32 if TINY else 1024
        N, draw = len(boundaries) - 1, torch.Generator().manual_seed(W)
        sizes = {"x": (1, TOKENS, channels), "weight": (channels, W), "bias": (channels,)}
        sizes |= {"residual": (1, TOKENS, channels), "initial_state": (N, channels, W - 1)}
        a: Arguments = {name: torch.randn(size, generator=draw).to(BF16) for name, size in sizes.items()}
        a |= {"activation": activation, "output_final_state": True}
        fed = incoming({"y": a["x"], "state": a["initial_state"]}, W)
        got = across(place, wyfold.causal_conv1d, a | {"T": TOKENS}, fed, boundaries, layout)
        if not place.leads:
            continue
        a["cu_seqlens"] = torch.tensor(boundaries)
        eager = a | {"backend": "eager"}
        alone = measured(lambda x: wyfold.causal_conv1d(**x), place.on(a), tuple(fed), fed=place.on(fed))
        yardstick = measured(lambda x: wyfold.causal_conv1d(**x), eager, tuple(fed), fed=fed)
        exact = {name: x.double() for name, x in fed.items()}
        truth = measured(lambda x: wyfold.causal_conv1d(**x), widened(eager), tuple(fed), fed=exact)
        verdicts = []
        for name, x in got.items():
            if name.removeprefix("d") in PARAMETERS:  # a sum of rounded shares: only the size of its error is bounded
                limit = 1.5 * rms(yardstick[name], truth[name])
                verdicts.append(judge(x.cpu(), truth[name], name=name, target=limit))
            else:
                verdicts.append(judge(x.cpu(), truth[name], yardstick[name], name=name))
        add_verdicts(add, "conv", f"{layout}, {W} taps, {activation}", verdicts, alone, truth)


# --- layers ----------------------------------------------------------------------------------------------------------

BUILT: dict[str, Callable[..., nn.Module]] = {
    "delta_net": lambda **more: layers.DeltaNet(4 * D, 4, head_dim=D, **more),
    "gated_delta_net": lambda **more: layers.GatedDeltaNet(4 * D, 4, 8, head_dim=D, **more),
    "kda": lambda **more: layers.KimiDeltaAttention(4 * D, 4, 4, D, **more),
    "ttt_linear": lambda **more: layers.TTTLinear(4 * D, 8, 8, D // 2, **more),
    "decoder": lambda **more: Decoder(
        DecoderConfig(hidden_size=4 * D, num_layers=4, pattern="kda gdn delta_net attention", num_heads=4, head_dim=D),
        **more,
    ),
}


class Step:
    """One step of a layer, or of a decoder's loss: the gradient of every parameter, and of the layer's input.

    Parameters are float32 under autocast to bfloat16, as in `wyfold train`, or float64.
    """

    def __init__(self, name: str, place: Place):
        self.name, self.place, self.tokens = name, place, 16 * 4 * place.world if TINY else 2048
        torch.manual_seed(0)
        self.module = BUILT[name]()
        size, T = 4 * D, self.tokens
        self.x = torch.randint(256, (1, T)) if name == "decoder" else torch.randn(1, T, size)
        self.arrow, self.labels = torch.randn(1, T, size), torch.randint(256, (1, T))
        units = T // 16  # mini-batches of TTT-Linear, between which sequences are cut
        self.bounds = 16 * torch.tensor([0, units * 5 // 16, units * 5 // 16, units * 13 // 16, units])

    def run(self, module: nn.Module, device: torch.device, own: Callable[[Tensor], Tensor], **where: Any) -> Named:
        dtype = next(module.parameters()).dtype
        x = own(self.x).to(device)
        x = x if self.name == "decoder" else x.detach().to(dtype, copy=True).requires_grad_()
        with torch.autocast(device.type, BF16, enabled=dtype != torch.float64):
            if self.name == "decoder":
                loss = module(x, own(self.labels).to(device), **where)[1]
            else:
                y = module(x, **where)
                loss = (y * own(self.arrow).to(y)).sum()
        loss.backward()
        found = {key: parameter.grad for key, parameter in module.named_parameters() if parameter.grad is not None}
        return found if self.name == "decoder" else found | {"x": x.grad}

    def copy(self, device: torch.device, dtype: torch.dtype, **more: Any) -> nn.Module:
        module = BUILT[self.name](**more)
        module.load_state_dict(self.module.state_dict())
        return module.to(device, dtype)


def module(add: Add, place: Place, name: str) -> None:
    """Gradients of every parameter over all ranks and on one, both compared with float64."""
    step = Step(name, place)
    alone, truth = {}, {}
    if place.leads:
        here = SequenceLayout(step.bounds.to(place.device), step.tokens)
        alone = step.run(step.copy(place.device, torch.float32), place.device, _as_it_is, layout=here)
        whole = SequenceLayout(step.bounds, step.tokens)
        truth = step.run(step.copy(HOST, torch.float64, backend="eager"), HOST, _as_it_is, layout=whole)
    for layout in LAYOUTS:
        if name == "ttt_linear" and layout == "zigzag" and step.tokens % (32 * place.world):
            continue  # it is cut between mini-batches
        context = build_cp_context(step.bounds, dist.group.WORLD, total_tokens=step.tokens, layout=layout)
        own = step.copy(place.device, torch.float32)
        got = step.run(own, place.device, lambda x, c=context: c.shard(x).contiguous(), cp_context=context)
        for key, gradient in got.items():
            if key == "x":
                with torch.no_grad():
                    got[key] = context.unshard(gradient)
            else:
                dist.all_reduce(gradient)
        if not place.leads:
            continue
        ours, theirs = ({key: rms(x.cpu(), truth[key]) for key, x in side.items()} for side in (got, alone))
        over = {}
        for key, error in ours.items():
            few = truth[key].numel() < FEW
            if not error <= (FEW_FACTOR if few else 1.25) * theirs[key]:
                over[key] = f"{error:.2e} beside {theirs[key]:.2e}, {truth[key].numel()} numbers"
        complete = ours.keys() == truth.keys()
        by = max(error / max(theirs[key], 1e-30) for key, error in ours.items())
        add("layers", f"{name}, {layout}", complete and not over, gradients=len(ours), most_by_one_gpu=by, over=over,
            rms=ours, one_gpu=theirs)  # fmt: skip


def _as_it_is(x: Tensor) -> Tensor:
    return x


# --- training --------------------------------------------------------------------------------------------------------


def train(add: Add, place: Place, folder: str, segmented: str = "1") -> None:
    """Losses of `wyfold train` on the language reference inside Python, each row's bytes over all ranks.

    One rank also runs with its sequences in segments, whose rounding differs as much as that of several ranks does.
    """
    run = Path(folder) / (f"cp {place.world}" + (f", {segmented} segments" if segmented != "1" else ""))
    words = ["train", "--out", str(run), "--device", place.device.type, "--dtype", "bfloat16", "--cp", str(place.world)]
    words += ["--steps", str(STEPS), "--eval-every", str(max(1, STEPS // 4)), "--save-every", str(STEPS)]
    words += ["--layers", "kda gdn delta_net attention", "--batch", str(BATCH), "--length", "1024", "--warmup", "20"]
    words += ["--lr", "0.001"]  # with 0.003, rounding grows to a percent of a loss in 200 steps
    if TINY:
        words += ["--layers", "kda attention", "--depth", "2", "--width", "32", "--heads", "2", "--head-dim", "16"]
        words += ["--length", "64", "--eval-bytes", "256"]
    began = time.monotonic()
    with segment_rule.forced(int(segmented)) if segmented != "1" else contextlib.nullcontext():
        code = wyfold_main(words)
    if place.leads:
        history = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses = [entry["loss"] for entry in history if "loss" in entry]
        looks = [value for entry in history for key, value in entry.items() if key.startswith("validation")]
        add("train", run.name, code == 0 and len(losses) == STEPS, losses=losses, looks=looks,
            seconds=time.monotonic() - began)  # fmt: skip


def compare_losses(ledger: Ledger) -> None:
    """Compare the curves of all runs step by step, after a mean over twenty steps, and their ends."""
    runs = {row["case"]: row for row in ledger.rows if row["part"] == "train" and "losses" in row}
    if "cp 1" not in runs:
        return
    first = _smooth(runs["cp 1"]["losses"])
    for name, row in runs.items():
        if name == "cp 1":
            continue
        apart = [abs(x - y) / y for x, y in zip(_smooth(row["losses"]), first)]
        looks = [abs(x - y) / y for x, y in zip(row["looks"], runs["cp 1"]["looks"])]
        held = None if "segments" in name else bool(looks) and max(apart[-1], looks[-1]) <= LOSSES
        ledger.add("train", f"{name} and cp 1", held, end_apart=apart[-1], most_apart=max(apart), looks_apart=looks)


def _smooth(losses: Sequence[float], over: int = 20) -> list[float]:
    return [statistics.mean(losses[max(0, i - over + 1) : i + 1]) for i in range(len(losses))]


# --- failures --------------------------------------------------------------------------------------------------------


def mismatch(add: Add, place: Place) -> None:
    """The last rank makes another call: all ranks raise a ValueError, and the group still works."""
    odd = place.rank == place.world - 1
    cases: dict[str, dict[str, Any]] = {
        "width of v": {"V": 2 * D},
        "heads": {"H": 3},
        "dtype": {"dtype": torch.float32},
        "tokens of its share": {"extra": 1},
        "operator": {"op": "chunk_delta_rule"},
        "boundaries": {"bounds": [0, 40, TOKENS]},
        "whether a backward follows": {"wanted": True},
    }
    for name, other in cases.items():
        usual: dict[str, Any] = {
            "V": D,
            "H": 2,
            "dtype": BF16,
            "extra": 0,
            "op": "chunk_gated_delta_rule",
            "bounds": [0, 50, TOKENS],
        }
        own: dict[str, Any] = usual | {"wanted": False} | (other if odd else {})
        context = build_cp_context(torch.tensor(own["bounds"]), dist.group.WORLD, total_tokens=TOKENS)
        size = (1, context.tokens + own["extra"], own["H"])
        q, k = (torch.ones(*size, D, device=place.device, dtype=own["dtype"]) for _ in range(2))
        v = torch.ones(*size, own["V"], device=place.device, dtype=own["dtype"])
        v.requires_grad_(own["wanted"])
        gate = {} if "gated" not in own["op"] else {"g": -torch.ones(size, device=place.device)}
        said, began = "nothing", time.monotonic()
        try:
            getattr(wyfold, own["op"])(q, k, v, **gate, cp_context=context)
        except ValueError as error:
            said = f"ValueError: {error}"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        heard: list[Any] = [None] * place.world
        dist.all_gather_object(heard, said[:200])
        if place.leads:
            held = all(words.startswith("ValueError") for words in heard)
            add("mismatch", name, held, said=heard, seconds=time.monotonic() - began)


def dying(place: Place, where: str) -> None:
    """A rank of `death`: the last one is killed between forward and backward, while the others are in `where`.

    "host": after the backward, where the host reads a number. "backward": inside of it, where it reads one itself.
    """
    faulthandler.dump_traceback_later(STUCK_S, exit=True)  # a survivor that hangs prints where
    place.join(TIMEOUT_S)
    context = build_cp_context(None, dist.group.WORLD, total_tokens=TOKENS)
    leaf = torch.ones(1, context.tokens, 2, D, device=place.device, dtype=BF16, requires_grad=True)

    def forward() -> Tensor:
        q = leaf * 1
        if where == "backward":
            q.register_hook(lambda gradient: print("READ", float(gradient.sum()), flush=True))
        return wyfold.chunk_kda(F.normalize(q, dim=-1), F.normalize(q, dim=-1), q, cp_context=context)[0]

    def step(last: bool) -> None:
        o = forward()
        place.wait()
        if last and place.rank == place.world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        o.sum().backward()
        print("READ", float(leaf.grad.sum()), flush=True)

    try:
        with Watch(dist.group.WORLD):
            step(last=False)  # compiles everything, and compares the ranks' calls
            dist.barrier()
            print(f"READY {time.time()}", flush=True)
            step(last=True)
            for _ in range(10 * STUCK_S):  # an exception from the watch's thread arrives between two sleeps
                time.sleep(0.1)
    except Exception as error:
        cause = type(error.__cause__).__name__
        said = f"{type(error).__name__} from {cause}: {' '.join(str(error).split())}"
        print(f"SAID {time.time()} {said}"[:600], flush=True)
        sys.exit(3)  # a normal exit, with destructors


def learning(folder: str) -> list[str]:
    """An endless run of `wyfold train`."""
    words = [sys.executable, "-m", "wyfold", "train", "--out", folder, "--device", HOST.type if TINY else "cuda"]
    words += ["--steps", "1000000", "--eval-every", "1000000", "--save-every", "1000000", "--warmup", "20"]
    words += ["--layers", "kda attention", "--depth", "2", "--batch", "2"]
    if TINY:
        return [*words, "--width", "32", "--heads", "2", "--head-dim", "16", "--length", "64", "--eval-bytes", "256"]
    return [*words, "--dtype", "bfloat16", "--length", "1024"]


def death(add: Add, ranks: str, where: str) -> None:
    """A rank dies mid-step under PyTorch's own settings: when, and by which exception, each survivor ends.

    `where` is as in `dying`, or "train": anywhere in a step of `wyfold train`.
    """
    world, port, training = int(ranks), free_port(), where == "train"
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(world)]
        history, children = Path(folder) / "run" / "metrics.jsonl", []
        command = [*job_command(__file__, f"dying:{where}"), "--rows", os.devnull]
        if training:
            command = [*learning(str(history.parent)), "--cp", ranks]
        for rank, log in enumerate(logs):
            with log.open("wb") as stream:
                own = {**os.environ, **environment(rank, world, port)}
                own |= {"TORCHELASTIC_RUN_ID": "proof"} if training else {}
                children.append(subprocess.Popen(command, env=own, stdout=stream, stderr=subprocess.STDOUT))
        ended: dict[int, float] = {}
        began = time.time()
        while len(ended) < world and time.time() - began < DEATH_LIMIT_S:
            for rank, child in enumerate(children):
                if rank not in ended and child.poll() is not None:
                    ended[rank] = time.time()
            if training and history.exists() and history.read_text().count("loss") > LIVED_STEPS:
                children[-1].kill()
            time.sleep(0.05)
        killed = ended.get(world - 1)
        for rank, child in enumerate(children):
            child.kill()  # children that have not ended by themselves
            child.wait()
            if rank == world - 1:
                continue
            lines = logs[rank].read_text(errors="replace").splitlines()
            marks = ("SAID", "wyfold train: Watch")
            said = next((line for line in lines if line.startswith(marks)), "")
            lasted = ended[rank] - killed if killed is not None and rank in ended else None
            raised = float(said.split()[1]) - killed if killed is not None and said.startswith("SAID") else None
            by_then = lasted if training else raised
            held = by_then is not None and lasted is not None and lasted <= NOTICED_S and f"rank {world - 1} of" in said
            add("death", f"{where}, survivor {rank} of {world}", held and child.returncode == (1 if training else 3),
                seconds_until_raised=raised, seconds_until_ended=lasted, said=said, code=child.returncode,
                killed_after_s=None if killed is None else killed - began, tail=lines[-TAIL:])  # fmt: skip


# --- scaling ---------------------------------------------------------------------------------------------------------

SCALING = {"gdn": layers.GatedDeltaNet, "kda": layers.KimiDeltaAttention}
LENGTHS = (256,) if TINY else (262144, 524288, 1048576)
"""Each length is twice the previous one, so its shares over twice as many GPUs are equal."""


def timed(place: Place, call: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds in every round of a call that all ranks begin together, on the slowest rank."""
    for _ in range(WARM):
        call()
    times = []
    for _ in range(rounds):
        place.wait()
        dist.barrier()
        place.wait()
        began = time.perf_counter()
        call()
        place.wait()
        times.append(time.perf_counter() - began)
    slowest = torch.tensor(times, device=place.device, dtype=torch.float64) * 1e3
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [round(ms, 3) for ms in slowest.tolist()]


def layer_step(
    place: Place, kind: str, T: int, context: ContextParallel | None
) -> tuple[nn.Module, Callable[[], None]]:
    """A bfloat16 layer of hidden size 1024 with 8 heads of 128, and a function that runs it forward and backward."""
    torch.manual_seed(0)
    H, width = (2, 2 * D) if TINY else (8, 1024)
    layer = SCALING[kind](width, H, head_dim=D).to(place.device, BF16)
    layer.decay_parameters.float()
    tokens = T if context is None else context.tokens
    x = torch.randn(1, tokens, width, device=place.device, dtype=BF16, requires_grad=True)
    arrow = torch.randn_like(x)
    where = {} if context is None else {"cp_context": context}

    def call() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x, **where).backward(arrow)

    return layer, call


def measure_layer(place: Place, kind: str, T: int, across: bool, rounds: int) -> dict[str, Any]:
    """Milliseconds, peak GiB above the weights on each rank, and bytes that this rank contributes."""
    if not TINY:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = 0 if TINY else torch.cuda.memory_allocated()
    context = build_cp_context(None, dist.group.WORLD, total_tokens=T) if across else None
    layer, call = layer_step(place, kind, T, context)
    weights = sum(p.numel() * p.element_size() for p in layer.parameters())
    failed = ""
    try:
        call()  # warm-up, and a check that it fits into memory
        place.wait()
    except torch.cuda.OutOfMemoryError as error:
        failed = f"out of memory: {error}"[:150]
    fits: list[Any] = [None] * place.world
    dist.all_gather_object(fits, failed)
    if any(fits):
        return {"failed": fits}
    rounds_ms = timed(place, call, rounds)
    with collectives.count_sent_bytes() as sent:
        call()
    peak = 0 if TINY else torch.cuda.max_memory_allocated() - before - weights
    peaks: list[Any] = [None] * place.world
    dist.all_gather_object(peaks, peak / 2**30)
    return {"ms": statistics.median(rounds_ms), "rounds_ms": rounds_ms, "GiB": peaks, "sent": sent}


def scaling(add: Add, place: Place, kind: str, rounds: str = "5") -> None:
    """One sequence through one layer, on one GPU and over all of them."""
    for T in LENGTHS:
        one, many = (measure_layer(place, kind, T, across, int(rounds)) for across in (False, True))
        if not place.leads:
            continue
        row: dict[str, Any] = {"one": one, "many": many}
        held = None
        if "ms" in one and "ms" in many:
            row |= {"faster": one["ms"] / many["ms"], "bytes_sent_by_a_rank": sum(many["sent"])}
            row["collectives"] = len(many["sent"])
            if not TINY:
                row["memory_by_one"] = max(many["GiB"]) / max(one["GiB"])
                if wanted := SCALED.get((place.world, kind, T)):
                    held = row["faster"] >= wanted and row["memory_by_one"] <= MEMORY / place.world
                    row["wanted"] = f"faster >= {wanted}, memory <= {MEMORY / place.world:.2f}"
        add("scaling", f"{kind} layer, {T} tokens, {place.world} GPUs", held, **row)


def compile_scaling(add: Add, place: Place, kind: str) -> None:
    """Compile the calls of `scaling`, including lengths whose shares are cut into segments."""
    T = 256 if TINY else 131072 * place.world
    for across in (False, True):
        measure_layer(place, kind, T, across, 1)


PEERS = ("ours", "fla")
PEER_TOKENS, PEER_LIMIT_S = (256, 60) if TINY else (262144, 45)
"""Tokens of the operators that are compared, and seconds after which one side's processes are killed."""


def peers(add: Add, place: Place, kind: str, mode: str, side: str, folder: str) -> None:
    """One side of a comparison with fla's context parallelism: an operator over one sequence, 8 heads of 128.

    `mode` is "forward" or "both". Each side runs in separate processes, since one of them may not return.
    """
    rule, bounds = {"gdn": "gated_delta_rule", "kda": "kda"}[kind], torch.tensor([0, PEER_TOKENS])
    context: Any = build_cp_context(bounds, dist.group.WORLD)
    tokens, op = context.tokens, getattr(wyfold, f"chunk_{rule}")
    if side == "fla":
        sys.path.insert(0, folder)
        from fla.ops.cp import build_cp_context as build_theirs

        op = getattr(importlib.import_module(f"fla.ops.{rule}"), f"chunk_{rule}")
        context = build_theirs(bounds.to(place.device), group=dist.group.WORLD)
    torch.manual_seed(place.rank)
    size = (1, tokens, 2 if TINY else 8, D)
    q, k = (F.normalize(torch.randn(size, device=place.device), dim=-1).to(BF16) for _ in range(2))
    v, arrow = (torch.randn(size, device=place.device).to(BF16) for _ in range(2))
    g = F.logsigmoid(torch.randn(size if kind == "kda" else size[:3], device=place.device)).clamp(min=-5)
    leaves = [x.requires_grad_(mode == "both") for x in (q, k, v, g, torch.rand(size[:3], device=place.device))]

    def step() -> None:
        q, k, v, g, beta = leaves
        o = op(q=q, k=k, v=v, g=g, beta=beta, cp_context=context)[0]
        if mode == "both":
            torch.autograd.grad(o, leaves, arrow)

    before = 0 if TINY else torch.cuda.memory_allocated()
    rounds = timed(place, step, 5)
    peak = 0 if TINY else torch.cuda.max_memory_allocated() - before
    if place.leads:
        case = f"{kind}, {mode}, {PEER_TOKENS} tokens, {place.world} GPUs, {side}"
        add("peers", case, None, ms=statistics.median(rounds), rounds_ms=rounds, MiB=peak / 2**20)


# --- main ------------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Environment variables that a launcher sets for a process."""
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "2"}
    return found | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}


def of_ranks(name: str, world: int, *, launched: bool = False, limit_s: float = 120, words: Sequence[str] = ()) -> Job:
    """A job of `world` ranks; with `launched` they are started as by torchrun. `words` are options of this program."""
    port = free_port()
    by = {"TORCHELASTIC_RUN_ID": "proof"} if launched else {}
    environments = [environment(rank, world, port) | by for rank in range(world)]
    return Job(name, [job_command(__file__, name, *words)] * world, environments, limit_s)


def jobs(ledger: Ledger, world: int, folder: str) -> list[Job]:
    """The parallel jobs, longest waiting time first."""
    found = [
        Job(f"death:{world}:{where}", [job_command(__file__, f"death:{world}:{where}")], limit_s=150)
        for where in DEATHS
    ]
    sizes = [size for size in (1, 2, 4, 8) if size <= world]
    found += [of_ranks(f"train:{folder}", size, launched=size > 1, limit_s=150) for size in reversed(sizes)]
    found += [of_ranks(f"train:{folder}:4", 1, limit_s=150)]
    found += [of_ranks(f"warm:{kind}", world) for kind in SCALING]
    found += [of_ranks(f"layers:{name}", world) for name in BUILT]
    found += [of_ranks(f"errors:{rule}:{layout}", world, limit_s=180) for rule in GATED for layout in LAYOUTS]
    found += [of_ranks(f"{part}:{layout}", world) for part in ("ttt", "conv") for layout in LAYOUTS]
    found += [of_ranks("mismatch", world)]
    return [job for job in found if ledger.wants("scaling" if job.part == "warm" else job.part)]


OF_RANKS: dict[str, Callable[..., None]] = {
    "errors": errors,
    "ttt": ttt,
    "conv": conv,
    "layers": module,
    "mismatch": mismatch,
    "warm": compile_scaling,
    "scaling": scaling,
    "peers": peers,
}


def one_job(args: argparse.Namespace) -> None:
    """Run the job that this process was started for."""
    name, *words = args.job.split(":")
    add = row_writer(args.rows)
    if name == "death":
        death(add, *words)
        return
    place = Place()
    if name == "dying":
        dying(place, *words)
        return
    if name == "train":
        train(add, place, *words)
        _leave()
    workspace.WORKSPACE_BYTES = 512 << 20  # for the truth; the default size is tuned for caches
    place.join()
    OF_RANKS[name](add, place, *words, *([args.peers] if name == "peers" else []))
    dist.barrier()
    dist.destroy_process_group()
    _leave()


def _leave() -> None:
    """Exit at once: threads of a destroyed group may still run, and would turn a slow exit into an error."""
    sys.stdout.flush()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser, budget=190)
    parser.add_argument("--ranks", type=int, default=2 if TINY else CARDS, help="ranks (default: as many as GPUs)")
    parser.add_argument("--peers", default="", help="folder with fla, put in front of Python's path")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.job:
        one_job(args)
        return 0
    if not TINY and args.ranks > CARDS:
        parser.error(f"--ranks: there are {CARDS} GPUs")
    ledger = Ledger("ranks", args)
    ledger.record["ranks"] = args.ranks
    with tempfile.TemporaryDirectory() as folder:
        run_parallel(ledger, jobs(ledger, args.ranks, folder), args.at_once)
    compare_losses(ledger)
    for kind in SCALING if ledger.wants("scaling") else ():
        run_parallel(ledger, [of_ranks(f"scaling:{kind}", args.ranks)], args.ranks)
    for case in itertools.product(SCALING, ("forward", "both"), PEERS) if ledger.wants("peers") else ():
        if case[-1] == "fla" and not args.peers:
            ledger.add("peers", f"{case[0]}, {case[1]}, fla", None, not_run="no --peers FOLDER with fla")
            continue
        job = of_ranks(f"peers:{':'.join(case)}", args.ranks, limit_s=PEER_LIMIT_S, words=["--peers", args.peers])
        job.promised = case[-1] == "ours"
        run_parallel(ledger, [job], args.ranks)
    return ledger.close()


if __name__ == "__main__":
    sys.exit(main())
