"""Ranks of a group compare their calls in every entry point with a `cp_context`.

Softmax attention, the layers, the decoder and `unshard` compared nothing. If one rank had other boundaries, or shapes
of the same number of bytes, results were wrong without an error. Other differences aborted the process or waited for
the group's timeout. Later a refusal was announced only in an operator's first call: in a call of another kind the other
ranks started to compare, and waited for the timeout.
"""

import re

import torch
from tests.context_parallel.ranks import Case, failures_on_ranks

import wyfold
from wyfold import layers
from wyfold.context_parallel import agreement
from wyfold.cp import build_cp_context
from wyfold.models import Decoder, DecoderConfig

WIDTH = 16
BOUNDS, OTHERS = torch.tensor([0, 4, 40]), torch.tensor([0, 30, 40])  # partitions with equal shares
THE_CUT = "the cut must be the same on all ranks, got sequences that end at 4, 40 .*; sequences that end at 30, 40 "


def attention(**changes):
    torch.manual_seed(0)
    return layers.SoftmaxAttention(**{"hidden_size": WIDTH, "num_heads": 4, "head_dim": 4, **changes})


def decoder(pattern="attention", **changes):
    torch.manual_seed(0)
    return Decoder(DecoderConfig(hidden_size=WIDTH, num_layers=1, pattern=pattern, num_heads=2, head_dim=8, **changes))


def rows(context, width=WIDTH, extra=0):
    return torch.ones(1, context.tokens + extra, width)


def tokens(context, extra=0):
    return torch.ones(1, context.tokens + extra, dtype=torch.int64)


def by_rank_1(complaint):
    """The message of a refusal by rank 1, as rank 1 and as the other ranks raise it."""
    return f"^(TTTLinear|causal_conv1d|.*): rank 1 of the group refused its arguments: {complaint}|^{complaint}"


def attention_cases(other):
    """Name -> (a call with a fresh context that differs on rank `other`, the message of all ranks)."""
    heads = {"num_kv_heads": 2, "head_dim": 8} if other else {"num_kv_heads": 4}
    frozen = attention().requires_grad_(False)
    return {
        "as many bytes": (
            lambda c: attention(**heads)(rows(c), cp_context=c),
            "SoftmaxAttention: num_kv_heads must be the same on all ranks, got 4 on rank 0; 2 on rank 1",
        ),
        "window": (
            lambda c: attention(window=8 if other else 9)(rows(c), cp_context=c),
            "SoftmaxAttention: window must be the same on all ranks, got 9 on rank 0; 8 on rank 1",
        ),
        "gradient": (
            lambda c: frozen(rows(c).requires_grad_(other), cp_context=c),
            "requires_grad must be the same on all ranks, got False on rank 0; True on rank 1",
        ),
        "gradient of x alone": (lambda c: attention()(rows(c).requires_grad_(other), cp_context=c), None),
        "tokens": (
            lambda c: attention()(rows(c, extra=other), cp_context=c),
            by_rank_1(r"SoftmaxAttention: x must be \[B, T, ...\] with T = 20, this rank's shard, got T = 21"),
        ),
        "dtype": (
            lambda c: attention()(rows(c).to(torch.bfloat16 if other else torch.float32), cp_context=c),
            by_rank_1("SoftmaxAttention: x must be float32, as the layer's parameters are"),
        ),
    }


def layer_cases(other):
    mixers = {name: getattr(layers, name)(WIDTH, 1, head_dim=8) for name in ("DeltaNet", "KimiDeltaAttention")}
    mixers |= {f"TTTLinear {conv}": layers.TTTLinear(WIDTH, 1, head_dim=8, conv_size=conv) for conv in (None, 4)}
    cases = {}
    for key, mixer in mixers.items():
        name = key.partition(" ")[0]
        cases |= {
            f"{key}: width": (
                lambda c, mixer=mixer: mixer(rows(c, WIDTH + other), cp_context=c),
                by_rank_1(rf"{name}: x must be \[B, T, 16\], got \[1, 20, 17\]"),
            ),
            f"{key}: tokens": (
                lambda c, mixer=mixer: mixer(rows(c, extra=other), cp_context=c),
                by_rank_1(rf"{name}: x must be \[B, T, ...\] with T = 20"),
            ),
            f"{key}: layout": (
                lambda c, mixer=mixer: mixer(rows(c), layout=c.layout if other else None, cp_context=c),
                by_rank_1(f"{name}: cp_context must come without layout and cache, got a layout"),
            ),
        }
    pooled = mixers["DeltaNet"]
    cases["pool"] = (
        lambda c: pooled(rows(c), cache=pooled.new_pool(1) if other else None, cp_context=c),
        by_rank_1("DeltaNet: cp_context must come without layout and cache, got a cache"),
    )
    return cases


def decoder_cases(other):
    def call(c, labels=True, change=lambda model: None, **changes):
        model = decoder(**changes)
        if other:
            change(model)
        return model(tokens(c), tokens(c) if labels else None, cp_context=c)

    def difference_message(name, values):
        return f"Decoder: {name} must be the same on all ranks, got {values}"

    return {
        "labels": (
            lambda c: call(c, labels=not other),
            difference_message("labels given", "True on rank 0; False on rank 1"),
        ),
        "tokens": (
            lambda c: decoder()(tokens(c, other), cp_context=c),
            by_rank_1(r"Decoder: ids must be \[B, T, ...\] with T = 20, this rank's shard, got T = 21"),
        ),
        "a token that is none": (
            lambda c: decoder()(tokens(c) * (400 if other else 1), cp_context=c),
            by_rank_1(r"Decoder: ids must be in \[0, 256\), got 400"),
        ),
        "a label that is none": (
            lambda c: decoder()(tokens(c), tokens(c) - 3 * other, cp_context=c),
            by_rank_1("Decoder: labels must be in .* got -2"),
        ),
        "options": (
            lambda c: call(c, options={"attention": {"window": 5 if other else 6}}),
            difference_message("config.options", ".*'window': 6.* on rank 0; .*'window': 5.* on rank 1"),
        ),
        "pattern": (
            lambda c: call(c, pattern="gdn" if other else "kda"),
            difference_message("config.pattern", "kda on rank 0; gdn on rank 1"),
        ),
        "frozen parameters": (
            lambda c: call(c, change=lambda model: model.blocks[0].mlp.requires_grad_(False)),
            difference_message("the parameters", ".* numbers, float32"),
        ),
        "recompute": (
            lambda c: call(c, change=lambda model: model.recompute("blocks")),
            difference_message("recompute", "None on rank 0; blocks on rank 1"),
        ),
        "a layout": (
            lambda c: decoder()(tokens(c), layout=c.layout if other else None, cp_context=c),
            by_rank_1("Decoder: cp_context must come without layout and cache, got a layout"),
        ),
    }


def unshard_cases(other):
    return {
        "as many bytes": (
            lambda c: c.unshard(torch.ones(2, c.tokens, 3) if other else torch.ones(1, c.tokens, 6)),
            r"the shape of x must be the same on all ranks, got \[1, tokens, 6\] on rank 0; \[2, tokens, 3\] on rank 1",
        ),
        "dtype": (
            lambda c: c.unshard(rows(c).to(torch.int32 if other else torch.float32)),
            "dtype of x must be the same on all ranks, got torch.float32 on rank 0; torch.int32 on rank 1",
        ),
        "gradient": (
            lambda c: c.unshard(rows(c).requires_grad_(other)),
            "requires_grad must be the same on all ranks, got False on rank 0; True on rank 1",
        ),
        "tokens": (
            lambda c: c.unshard(rows(c, extra=other)),
            by_rank_1("ContextParallel.unshard: x must have 20 tokens along dim 1"),
        ),
    }


def compared(cases):
    """Run a table of cases on every rank."""

    def on_each_rank(given, group):
        wrong = []  # raised at the end, because the other rank goes on
        for name, (call, complaint) in cases(group.rank() == 1).items():
            said = None
            try:
                call(build_cp_context(BOUNDS, group))
            except (TypeError, ValueError) as error:
                said = str(error)
            if (said is None) is not (complaint is None) or not re.search(complaint or "", said or ""):
                wrong.append(f"{name}: {said}")
        assert not wrong, "\n".join(wrong)

    return on_each_rank


def boundaries(given, group):
    """Other boundaries with equal shares on rank 1 would give wrong results without a comparison."""
    for name, call in {
        "SoftmaxAttention": lambda c: attention()(rows(c), cp_context=c),
        "Decoder": lambda c: decoder()(tokens(c), cp_context=c),
        "ContextParallel.unshard": lambda c: c.unshard(rows(c)),
        "causal_conv1d": lambda c: layers.ShortConvolution(WIDTH, 4)(rows(c), cp_context=c),
    }.items():
        try:
            call(build_cp_context(OTHERS if group.rank() == 1 else BOUNDS, group))
        except ValueError as error:
            assert re.search(f"^{name}: {THE_CUT}", str(error)), f"{name}: {error}"
        else:
            raise AssertionError(f"{name}: not refused")


def compared_once(given, group):
    """A decoder compares once for all of its layers; its backward and a second call compare nothing."""
    found = []
    agree = agreement.check_agreement
    agreement.check_agreement = lambda *said: (found.append(said[0]), agree(*said))
    try:
        context = build_cp_context(BOUNDS, group)
        model = decoder("kda attention ttt_linear")
        model.recompute("blocks")
        for _ in range(2):
            model(tokens(context), tokens(context), cp_context=context)[1].backward()
        assert found == ["Decoder"]
        for _ in range(2):
            context.unshard(rows(context))
            attention()(rows(context), cp_context=context)
        assert found == ["Decoder", "ContextParallel.unshard", "SoftmaxAttention"]
        for check, expected in (("always", ["Decoder", "SoftmaxAttention"] * 2), ("never", [])):
            found.clear()
            context = build_cp_context(BOUNDS, group, check=check)
            for _ in range(2):
                decoder()(tokens(context), cp_context=context)
            assert found == expected, check
    finally:
        agreement.check_agreement = agree


def refused_by_one_rank(given, group):
    """A refusal by one rank after the first comparison is local: the others are in the operator's collectives."""
    context = build_cp_context(BOUNDS, group)
    mixer, model = layers.KimiDeltaAttention(WIDTH, 1, head_dim=8), decoder()
    for call, argument in ((mixer, rows), (attention(), rows), (model, tokens)):
        call(argument(context), cp_context=context)
        wrong = {
            "T = 20, this rank's shard, got T = 21": argument(context, extra=1),
            "with boundaries must come with a batch of B = 1, got B = 2": torch.cat([argument(context)] * 2),
        }
        if argument is rows:
            wrong["x must be [B, T, 16], got [1, 20, 17]"] = rows(context, width=17)
        for complaint, x in wrong.items() if group.rank() == 1 else ():
            try:
                call(x, cp_context=context)
            except ValueError as error:
                assert complaint in str(error)
            else:
                raise AssertionError("not refused")
    assert context.all_gather(torch.tensor([group.rank()])).tolist() == [[0], [1]]


def new_kinds(given, group):
    """A refusal by rank 1 in the first call of another kind reaches both ranks, as in the very first call."""

    def rule(c, B, wrong, heads=1, dtype=torch.float32):
        q, k, v = (torch.ones(B, c.tokens, heads, 8, dtype=dtype) for _ in range(3))
        return wyfold.chunk_delta_rule(q, k, v, torch.ones(B, c.tokens, heads + wrong), cp_context=c)

    def ttt(c, B, wrong):
        q, k, v = (torch.ones(B, c.tokens, 1, 8) for _ in range(3))
        return wyfold.chunk_ttt_linear(q, k, v, torch.ones(1, 8 + wrong), torch.ones(1, 8), eta=0.1, cp_context=c)

    def conv(c, B, wrong):
        return wyfold.causal_conv1d(torch.ones(B, c.tokens, 8), torch.ones(8 + wrong, 4), cp_context=c)

    def model(c, B, wrong, labels=True, depth=1):
        torch.manual_seed(0)
        config = DecoderConfig(hidden_size=8, num_layers=depth, pattern="attention", num_heads=1, head_dim=8)
        ids = torch.ones(B, c.tokens, dtype=torch.int64)
        return Decoder(config)(ids + 400 * wrong, ids if labels else None, cp_context=c)

    def unshard(c, B, wrong, width=4):
        return c.unshard(torch.ones(B, c.tokens + wrong, width))

    def layer(make):
        mixer = make()
        return lambda c, B, wrong: mixer(torch.ones(B, c.tokens + wrong, WIDTH), cp_context=c)

    calls = {
        "delta rule": (rule, [{"B": 2}, {"B": 1, "heads": 2}, {"B": 1, "dtype": torch.bfloat16}]),
        "ttt": (ttt, [{"B": 2}]),
        "conv": (conv, [{"B": 2}]),
        "decoder": (model, [{"B": 2}, {"B": 1, "labels": False}, {"B": 1, "depth": 2}]),
        "unshard": (unshard, [{"B": 2}, {"B": 1, "width": 5}]),
        "attention": (layer(attention), [{"B": 2}]),
        "layer": (layer(lambda: layers.KimiDeltaAttention(WIDTH, 1, head_dim=8)), [{"B": 2}]),
    }
    wrong = []  # raised at the end, because the other rank goes on
    for name, (call, kinds) in calls.items():
        for kind in kinds:
            context = build_cp_context(None, group, total_tokens=32)
            call(context, 1, 0)
            try:
                call(context, wrong=int(group.rank() == 1), **kind)
                said = "nothing"
            except (TypeError, ValueError) as error:
                said = str(error)
            if ("rank 1 of the group refused its arguments" in said) is not (group.rank() == 0) or said == "nothing":
                wrong.append(f"{name} {kind}: {said}")
    assert not wrong, "\n".join(wrong)


def new_modes(given, group):
    """The same for a refusal in the first call with gradients after a call without."""
    context = build_cp_context(BOUNDS, group)
    mixer = attention()
    with torch.no_grad():
        mixer(rows(context), cp_context=context)
    try:
        mixer(rows(context, extra=group.rank()), cp_context=context)
    except ValueError as error:
        assert re.search(by_rank_1("SoftmaxAttention: x must be"), str(error)), str(error)
    else:
        raise AssertionError("not refused")


def kinds_that_differed(given, group):
    """A call that was refused because ranks differ does not count as compared; its next refusal is announced too."""
    context, mixer = build_cp_context(BOUNDS, group), attention(window=8 + group.rank())
    for extra, complaint in ((0, "window must be the same on all ranks"), (group.rank(), "x must be")):
        try:
            mixer(rows(context, extra=extra), cp_context=context)
        except ValueError as error:
            assert complaint in str(error), str(error)
        else:
            raise AssertionError("not refused")


TABLES = (attention_cases, layer_cases, decoder_cases, unshard_cases)
CASES = {table.__name__: Case(lambda: None, compared(table)) for table in TABLES}
CASES |= {
    run.__name__: Case(lambda: None, run)
    for run in (compared_once, refused_by_one_rank, new_kinds, new_modes, kinds_that_differed)
}
BOUNDARIES = {"boundaries": Case(lambda: None, boundaries)}


def test_other_boundaries_on_one_rank_are_refused_on_all(tmp_path):
    assert not failures_on_ranks([2], tmp_path, __name__, "BOUNDARIES")


def test_differences_between_ranks_are_refused_on_all(tmp_path):
    assert not failures_on_ranks([2], tmp_path, __name__, "CASES")
