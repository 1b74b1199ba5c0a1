"""A run over several processes can be resumed from each of its checkpoints.

An evaluation left the parameters of the root module (embedding, last norm) gathered. A checkpoint written right after
it, as the last one always is, lacked their optimizer moments. Resuming raised a ValueError, and repeating the command
of a finished run ended in a traceback.
"""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from tests.context_parallel.ranks import Case, failures_on_ranks
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from wyfold.cli.distributed import DistributedWorld
from wyfold.cli.train import checkpoint
from wyfold.cli.train.corpus import Corpus
from wyfold.cli.train.recipe import Recipe
from wyfold.cli.train.trainer import Trainer

DATA = Corpus.of("words", [word * 60 for word in (b"one two three ", b"red green blue ", b"spring summer ")])
RECIPE = {
    "data": "", "layers": "gdn ttt_linear", "depth": 2, "width": 16, "heads": 2, "head_dim": 8, "window": 8,
    "packed": False, "batch": 2, "length": 16, "grad_accum": 1, "steps": 2, "minutes": None, "lr": 0.02, "warmup": 1,
    "lr_end": 0.1, "weight_decay": 0.1, "clip": 1.0, "held_out": 0.1, "eval_every": 1, "eval_bytes": 64, "seed": 0,
    "dtype": "float32",
}  # fmt: skip


def of_a_run(folder, world, **changes):
    return Trainer(
        Recipe(**{**RECIPE, "replicas": world.replicas, **changes}), DATA, folder, torch.device("cpu"), world=world
    )


def history(folder):
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in entry.items() if key != "tokens_per_second"} for entry in entries]


def state(run):
    """All parameters and moments of a run, by name."""
    found = dict(run.model.state_dict())
    for name, parameter in run.model.named_parameters():
        found |= {f"{name}/{key}": value for key, value in run.optimizer.state[parameter].items()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}


def resume_every_checkpoint(folder, group):
    """Each step is evaluated and saved; each checkpoint is resumed, trained to the end, and resumed again."""
    checkpoint.KEPT = 10
    world = DistributedWorld(torch.device("cpu"), cp=1)
    first = of_a_run(folder / "whole", world)
    first.evaluate()
    first.save()
    assert first.train(save_every=1)
    expected, steps = state(first), sorted((folder / "whole" / "checkpoint").iterdir())
    assert len(steps) == 3
    for step in steps:
        mine = folder / step.name
        if world.is_main:
            shutil.copytree(step, mine / "checkpoint" / step.name)
        dist.barrier()
        assert of_a_run(mine, world).train(save_every=10), step
        again = of_a_run(mine, world)
        assert again.complete and again.step == 2, step
        found = state(again)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], x) for name, x in expected.items()), step
        if world.is_main:
            assert history(mine)[-2:] == history(folder / "whole")[-2:], step


def parameters_after_an_evaluation(folder, group):
    """They are those of the optimizer, so that gradients and moments can be looked up by parameter."""
    run = of_a_run(folder / "looked", DistributedWorld(torch.device("cpu"), cp=group.size()), layers="kda attention")
    known = {id(parameter) for held in run.optimizer.param_groups for parameter in held["params"]}
    run.evaluate()
    assert {id(parameter) for parameter in run.model.parameters()} == known
    run._take_step()
    assert {id(parameter) for parameter in run.model.parameters()} == known == {*map(id, run.optimizer.state)}


OF_A_GROUP = {
    name: Case(lambda: Path(tempfile.mkdtemp(prefix="wyfold-")), run)
    for name, run in (
        ("resume every checkpoint", resume_every_checkpoint),
        ("parameters after an evaluation", parameters_after_an_evaluation),
    )
}


@pytest.mark.long
def test_every_checkpoint_resumes_to_the_end(tmp_path):
    assert not failures_on_ranks([2], tmp_path, __name__, "OF_A_GROUP")
