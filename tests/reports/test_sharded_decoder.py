"""A decoder sharded by FSDP2 generated other tokens than the plain one.

Each layer's cache was a dict, and `fully_shard(block, mp_policy=...)` passes the module a copy of every dict, so each
step started from an empty state.
"""

import copy
import os
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from tests.context_parallel.ranks import Case, failures_on_ranks
from torch.distributed.device_mesh import init_device_mesh

from wyfold import SequenceLayout
from wyfold.integrations import dtensor
from wyfold.layers import DecayParameters
from wyfold.models import Decoder, DecoderConfig
from wyfold.models.block import Block
from wyfold.reference.error import judge, require

PATTERNS = ("gdn kda ttt_linear delta_net attention", "gdn kda delta_net")  # the second one can use pools
PROMPT, STEPS = 10, 7  # a mini-batch of TTT ends after 16 tokens
BOUND = 1e-10  # float64


def decoder(pattern: str, tied: bool) -> Decoder:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_heads": 2, "head_dim": 16, "num_layers": len(pattern.split())}
    model = Decoder(DecoderConfig(pattern=pattern, tied=tied, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def decoded(model: Decoder, ids: torch.Tensor, caches: bool, **of_pools) -> torch.Tensor:
    """Logits of a prompt and of the single tokens after it, from a cache or from pools."""
    cache = model.new_cache(len(ids))
    if not caches:
        pools = model.new_pools(5, **of_pools)
        slots = torch.tensor([3, 0])
    pieces = [ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)]
    with torch.no_grad():
        return torch.cat([model(piece, cache=cache if caches else pools.at(slots))[0] for piece in pieces], dim=1)


def sharded(model: Decoder, dtype: torch.dtype, apart: bool) -> Decoder:
    """The model under `fully_shard`; with `apart`, embedding and head are sharded separately."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    own = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if dtype != torch.float32:
        own["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype)
    parts = [model.embedding, *([] if model.head is None else [model.head])] if apart else []
    for part in (*parts, *model.blocks, model):
        fully_shard(part, **own)
    return model


def prepared():
    found = []
    for pattern in PATTERNS:
        for dtype in (torch.float32, torch.bfloat16):
            for tied in (True, False):
                model = decoder(pattern, tied)
                ids = torch.randint(256, (2, PROMPT + STEPS))
                plain = copy.deepcopy(model).to(dtype)
                truth = {caches: decoded(plain, ids, caches) for caches in {True, pattern == PATTERNS[0]}}
                tokens = plain.generate(ids[:, :PROMPT], 3, temperature=0)
                layout = SequenceLayout.from_lengths([7, PROMPT - 7])
                packed = list(plain.stream(ids[:1, :PROMPT], 3, temperature=0, layout=layout))
                # Any three of the four factors occur in every combination.
                apart = tied ^ (dtype == torch.float32) ^ (pattern == PATTERNS[0])
                found.append((model, dtype, apart, ids, truth, tokens, packed))
    return found


def sharded_equals_plain(given, group):
    for model, dtype, apart, ids, truth, tokens, packed in given:
        ours = sharded(copy.deepcopy(model), dtype, apart)
        for caches, logits in truth.items():
            low = {} if caches or dtype == torch.float32 else {"dtype": dtype}
            assert torch.equal(decoded(ours, ids, caches, **low), logits), (dtype, apart, caches)
        assert torch.equal(ours.generate(ids[:, :PROMPT], 3, temperature=0), tokens)
        layout = SequenceLayout.from_lengths([7, PROMPT - 7])
        again = ours.stream(ids[:1, :PROMPT], 3, temperature=0, layout=layout)
        assert all(torch.equal(a, b) for a, b in zip(again, packed, strict=True))


def small():
    return decoder("gdn", tied=True).double(), torch.randint(256, (2, 12))


def sharded_trains_after_generating(given, group):
    """Parameters gathered for generation are resharded: the gradients are those of the plain model."""
    model, ids = given
    plain, ours = copy.deepcopy(model), sharded(copy.deepcopy(model), torch.float32, apart=True)
    ours.generate(ids, 3, temperature=0)
    plain(ids, ids)[1].backward()
    ours(ids, ids)[1].backward()
    for name, parameter in ours.named_parameters():
        require(judge(parameter.grad.full_tensor(), plain.get_parameter(name).grad, name=name, target=BOUND))


def stopped_process_continues(given, group):
    """A process whose generation has ended continues until all have, because each step gathers parameters from all."""
    model, ids = given
    mine = ids[:1] + dist.get_rank() * 7 % 256
    first = model.generate(ids[:1] % 256, 1, temperature=0)[0, -1].item()  # ends process 0 at once
    plain = model.generate(mine % 256, 5, temperature=0, stop=first)
    ours = sharded(copy.deepcopy(model), torch.float32, apart=False)
    found = ours.generate(mine % 256, 5, temperature=0, stop=first)
    assert torch.equal(found[:, : plain.shape[1]], plain) and (found[:, plain.shape[1] :] == first).all()


def sharded_is_saved_from_one_process(given, group):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model, folder = given[0], tempfile.mkdtemp()
    ours = sharded(copy.deepcopy(model), torch.float32, apart=False)
    with pytest.raises(
        ValueError, match=r"^Decoder.save: state_dict must hold ordinary tensors, got a DTensor for emb"
    ):
        ours.save(folder)
    assert not os.listdir(folder)
    whole = get_model_state_dict(ours, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        ours.save(folder, state_dict=whole)
        again = Decoder.load(folder).state_dict()
        assert all(torch.equal(x, again[name]) for name, x in model.state_dict().items())
    with pytest.raises(ValueError, match=r"^Decoder.save: state_dict must hold blocks"):
        ours.save(folder, state_dict={"embedding.weight": model.embedding.weight})


def tensor_parallel_head(given, group):
    """With PyTorch's tensor parallelism, while the rest of the decoder has ordinary tensors."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model, ids = decoder("gdn kda", tied=False).double(), given[1]
    ours = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"head": ColwiseParallel(output_layouts=Replicate(), use_local_output=True)}
    parallelize_module(ours, mesh, plan)
    with torch.no_grad():
        require(judge(ours(ids)[0], model(ids)[0], name="logits", target=BOUND))
    assert torch.equal(ours.generate(ids, 4, temperature=0), model.generate(ids, 4, temperature=0))


def tensor_parallel_decoder_serves_from_pools(given, group):
    model, ids = decoder("gdn kda", tied=True).double(), given[1]
    ours = copy.deepcopy(model)
    dtensor.parallelize(ours, init_device_mesh("cpu", (dist.get_world_size(),)))
    truth = decoded(model, ids, caches=False)
    require(judge(decoded(ours, ids, caches=False), truth, name="logits", target=BOUND))
    ours.recompute("blocks")
    ours(ids, ids)[1].backward()
    with pytest.raises(ValueError, match=r"^Decoder.save: state_dict must hold blocks"):
        ours.save(tempfile.mkdtemp())
    ours.save(folder := tempfile.mkdtemp(), state_dict=dtensor.whole(ours))
    assert torch.equal(Decoder.load(folder)(ids)[0], model(ids)[0])


def older_wrappers_equal_plain(given, group):
    """DistributedDataParallel, and FSDP1 with separately sharded decays, which it frees after their call."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model, ids = decoder("gdn kda attention", tied=True).double(), given[1]
    truth = decoded(model, ids, caches=True)
    kinds = ModuleWrapPolicy({Block, DecayParameters})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation, and a remark on groups of one rank
        wrapped = [torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model))] + [
            FullyShardedDataParallel(
                copy.deepcopy(model), auto_wrap_policy=kinds, device_id=torch.device("cpu"), use_orig_params=own
            )
            for own in (True, False)
        ]
        for ours in wrapped:
            cache, pieces = model.new_cache(2), [ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)]
            with torch.no_grad():
                found = torch.cat([ours(piece, cache=cache)[0] for piece in pieces], dim=1)
            require(judge(found, truth, name="logits", target=BOUND))
            ours(ids, ids)[1].backward()


def pools_of_a_sharded_decoder_are_plain_tensors(given, group):
    model, _ = given
    pool = sharded(copy.deepcopy(model), torch.float32, apart=False).new_pools(3).layers[0]
    assert type(pool.conv) is type(pool.state) is torch.Tensor
    assert pool.conv.shape == (3, 96, 3) and pool.state.shape == (3, 2, 16, 16)


def further_rules():
    model = decoder("gla gdn2 gdp rwkv7 rwkv7 path_attention", tied=True)
    return model, torch.randint(256, (2, PROMPT + STEPS))


def further_rules_equal_plain(given, group):
    """Blocks of RWKV-7 pass the values of the first one on, also where each block is sharded by itself."""
    model, ids = given
    for dtype in (torch.float32, torch.bfloat16):
        plain, ours = copy.deepcopy(model).to(dtype), sharded(copy.deepcopy(model), dtype, apart=False)
        assert torch.equal(decoded(ours, ids, caches=True), decoded(plain, ids, caches=True)), dtype
    plain, ours = copy.deepcopy(model).double(), sharded(copy.deepcopy(model).double(), torch.float32, apart=True)
    layout = SequenceLayout.from_lengths([9, 0, 1, 7])
    for of in (plain, ours):
        of.recompute("blocks" if of is ours else None)
        of(ids[:1], ids[:1], layout=layout)[1].backward()
    for name, parameter in ours.named_parameters():
        require(judge(parameter.grad.full_tensor(), plain.get_parameter(name).grad, name=name, target=BOUND))


CASES = {
    "sharded is plain": Case(prepared, sharded_equals_plain, least=2),
    "further rules equal plain": Case(further_rules, further_rules_equal_plain, least=2),
    **{
        run.__name__.replace("_", " "): Case(small, run)
        for run in (
            sharded_trains_after_generating,
            stopped_process_continues,
            sharded_is_saved_from_one_process,
            tensor_parallel_head,
            tensor_parallel_decoder_serves_from_pools,
            pools_of_a_sharded_decoder_are_plain_tensors,
            older_wrappers_equal_plain,
        )
    },
}


@pytest.mark.long
def test_a_sharded_decoder_equals_a_plain_one(tmp_path):
    """On two processes, and for most of it on one: logits, tokens and gradients; unsupported uses are refused."""
    assert not failures_on_ranks([1, 2], tmp_path, __name__, "CASES")
