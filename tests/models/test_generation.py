"""Generation: the same tokens for every way of prefilling, and samples of the right distribution."""

import pytest
import torch

from wyfold import SequenceLayout
from wyfold.models import Decoder, DecoderConfig, generation


def test_greedy_tokens_are_those_of_a_full_recompute(model, ids):
    whole = ids
    for _ in range(20):
        whole = torch.cat([whole, model(whole)[0][:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(model.generate(ids, 20, temperature=0), whole)


def test_a_long_prompt_is_prefilled_in_pieces(model, ids, monkeypatch):
    whole = model.generate(ids, 8, temperature=0)
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 10)
    assert torch.equal(model.generate(ids, 8, temperature=0), whole)


def test_a_seed_repeats_the_draws(model, ids):
    random = torch.get_rng_state()
    first, again, other = (model.generate(ids, 16, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), random)
    drawn = model.generate(ids, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(drawn, first)


def test_packed_prompts_are_continued_as_if_alone():
    """Prompts of any lengths, prefilled together, long ones in pieces. Samples equal those of single prompts."""
    torch.manual_seed(3)
    config = DecoderConfig(hidden_size=16, num_layers=3, pattern="gdn attention ttt_linear", num_heads=2, head_dim=8)
    model = Decoder(config).double()
    prompts = [torch.randint(256, (1, length)) for length in (3, 150, 1, 70)]
    layout = SequenceLayout.from_lengths([prompt.shape[1] for prompt in prompts])
    for options in ({"temperature": 0}, {"seed": 5, "temperature": 0.9, "top_k": 40}):
        together = model.stream(torch.cat(prompts, 1), 6, layout=layout, shared_draws=True, **options)
        rows = torch.stack(list(together), 1)
        for prompt, row in zip(prompts, rows, strict=True):
            assert torch.equal(model.generate(prompt, 6, **options)[0, prompt.shape[1] :], row)


def test_a_prompt_without_tokens_is_refused(model):
    layout = SequenceLayout.from_lengths([3, 0, 2])
    with pytest.raises(ValueError, match=r"^Decoder.generate: layout must have prompts of at least one token, got"):
        model.stream(torch.zeros(1, 5, dtype=torch.int64), 3, layout=layout)


def test_a_stream_is_what_generate_collects(model, ids):
    tokens = list(model.stream(ids, 9, seed=5, temperature=0.7))
    assert len(tokens) == 9 and all(token.shape == (2,) for token in tokens)
    collected = model.generate(ids, 9, seed=5, temperature=0.7)
    assert torch.equal(collected, torch.cat([ids, torch.stack(tokens, dim=1)], dim=1))


def test_draws_follow_the_distribution():
    """30,000 samples of four tokens under each option, against the truncated probabilities."""
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0]).log1p().expand(30_000, 4)  # 2 : 4 : 3 : 1
    for options, truth in [
        ((1.0, None, None), [0.2, 0.4, 0.3, 0.1]),
        ((0.5, None, None), [4 / 30, 16 / 30, 9 / 30, 1 / 30]),
        ((1.0, 2, None), [0, 4 / 7, 3 / 7, 0]),
        ((1.0, 9, None), [0.2, 0.4, 0.3, 0.1]),
        ((1.0, None, 0.75), [2 / 9, 4 / 9, 3 / 9, 0]),
        ((1.0, None, 0.05), [0, 1, 0, 0]),
        ((0.0, None, None), [0, 1, 0, 0]),
    ]:
        draw = generation.Draw(*options, torch.Generator().manual_seed(0))
        share = torch.bincount(draw(logits), minlength=4) / 30_000
        truth = torch.tensor(truth)
        assert torch.equal(share > 0, truth > 0)
        assert (share - truth).abs().max() < 0.012  # four standard deviations


def test_a_row_ends_at_its_stop_token(model, ids):
    free = model.generate(ids, 20, temperature=0)
    stop = int(free[0, ids.shape[1] + 4])
    first = [(row == stop).nonzero() for row in free[:, ids.shape[1] :]]
    ends = [int(found[0]) if len(found) else 19 for found in first]
    stopped = model.generate(ids, 20, temperature=0, stop=stop)
    assert stopped.shape[1] == ids.shape[1] + max(ends) + 1
    for row, end in enumerate(ends):
        new = stopped[row, ids.shape[1] :]
        assert torch.equal(new[: end + 1], free[row, ids.shape[1] :][: end + 1])
        assert (new[end + 1 :] == stop).all()


def test_memory_does_not_grow(model, ids):
    cache = model.new_cache(2)
    with torch.inference_mode():
        model(ids, cache=cache)
        size = cache.nbytes
        for _ in range(10):
            model(ids[:, :1], cache=cache)
            assert cache.nbytes == size > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize(("mixer", "K", "V"), [("gdn", 256, 512), ("kda", 128, 256), ("gdn", 64, 64)])
def test_pools_and_a_graph_change_no_token(mixer: str, K: int, V: int, monkeypatch):
    """On a GPU, steps are replays of a graph on pools; of a sharded model they are calls with a cache."""
    sizes = {"hidden_size": 256, "num_layers": 2, "num_heads": 2, "head_dim": K, "head_v_dim": V}
    model = Decoder(DecoderConfig(pattern=mixer, **sizes)).to("cuda", torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    ids, graphs, replay = torch.randint(256, (3, 70), device="cuda"), [], generation.Replay
    monkeypatch.setattr(generation, "Replay", lambda step: graphs.append(step) or replay(step))
    pooled = model.generate(ids, 24, temperature=0)
    assert len(graphs) == 1 and pooled[:, 70:].unique().numel() > 10
    monkeypatch.setattr(generation, "_plain", lambda *_: False)
    assert torch.equal(model.generate(ids, 24, temperature=0), pooled) and len(graphs) == 1


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"temperature": "hot"}, "temperature must be a number, got str"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 1, "generator": torch.Generator()}, "seed must be None where a generator is given, got 1"),
        ({"stop": -1}, "stop must be at least 0, got -1"),
        ({"ids": torch.zeros(1, 0, dtype=torch.int64)}, r"ids must hold at least one token, got \[1, 0\]"),
        ({"ids": torch.zeros(0, 3, dtype=torch.int64)}, r"ids must hold at least one token, got \[0, 3\]"),
    ],
)
def test_generation_errors_come_before_the_first_token(model, ids, keywords, message):
    with pytest.raises((ValueError, TypeError), match=f"^Decoder.generate: {message}$"):
        model.stream(**{"ids": ids, "max_new_tokens": 3} | keywords)
