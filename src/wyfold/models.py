"""One decoder: a small language model whose layers are named by a pattern.

Notable:
- delta-rule, TTT and softmax attention layers in any order, `pattern="kda*3 attention"` repeated to depth
- pre-norm blocks: RMSNorm, mixer, residual; RMSNorm, SwiGLU, residual; no biases but those of the papers' gates
- rotary positions in the attention layers alone: recurrences and convolutions know the order of what they read
- embedding and output matrix are one, unless the configuration says otherwise
- packed documents by a `SequenceLayout` that every layer reads
- generation from a cache whose size does not grow, but for attention without a window
- the loss is float32 whatever the parameters are
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from wyfold import layers
from wyfold.layers.cache import DecodingCache, DecodingPools, LayerCache, LayerPool, PooledCache
from wyfold.parallel.context import ContextParallel
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.replay import Replay
from wyfold.stages import table

MIXERS: dict[str, type[nn.Module]] = {
    "delta_net": layers.DeltaNet,
    "gated_delta_net": layers.GatedDeltaNet,
    "kda": layers.KimiDeltaAttention,
    "ttt_linear": layers.TTTLinear,
    "attention": layers.SoftmaxAttention,
}
ALIASES = {"gdn": "gated_delta_net"}

IGNORED = -100  # a label that counts for nothing, as in torch.nn.functional.cross_entropy
PREFILL_TOKENS = 2048  # a longer prompt is read in pieces, so that its activations do not grow with it
PREFILL_GRID = 64  # packed prompts are cut at multiples of it, where a cut changes no state

RECOMPUTED = ("selective", "blocks")
KEPT_RESULTS = frozenset(
    {"wyfold.delta_fwd", "wyfold.ttt_fwd"}
    | {f"aten._scaled_dot_product_{kind}" for kind in ("flash_attention", "efficient_attention", "cudnn_attention")}
    | {"aten._scaled_dot_product_flash_attention_for_cpu"}
)

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What a decoder is made of.

    Args:
        vocab_size: Token ids are 0 to vocab_size - 1. 256 for bytes.
        hidden_size: Width of the residual stream.
        num_layers: Blocks.
        pattern: Names of mixers, each with an optional count, "kda*3 attention", repeated to num_layers: delta_net,
            gated_delta_net (gdn), kda, ttt_linear, attention.
        num_heads, num_v_heads, head_dim, head_v_dim, conv_size: Passed to every mixer that takes them.
        mlp_size: Inner width of the MLP; None = 8/3 of hidden_size, up to a multiple of 16.
        tied: Whether the output matrix is the embedding.
        norm_eps: eps of the norms of the residual stream.
        options: Mixer's name -> its further or differing arguments: {"attention": {"window": 256}}.

    Raises:
        TypeError, ValueError: naming the field.

    Example:
        >>> DecoderConfig(pattern="gdn*2 attention", num_layers=4).layers
        ('gated_delta_net', 'gated_delta_net', 'attention', 'gated_delta_net')
    """

    vocab_size: int = 256
    hidden_size: int = 256
    num_layers: int = 4
    pattern: str = "gdn*3 attention"
    num_heads: int = 4
    num_v_heads: int | None = None
    head_dim: int = 64
    head_v_dim: int | None = None
    conv_size: int = 4
    mlp_size: int | None = None
    tied: bool = True
    norm_eps: float = 1e-6
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        name = "DecoderConfig"
        for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "head_dim", "conv_size"):
            check.integer(name, field, getattr(self, field), least=1)
        for field in ("num_v_heads", "head_v_dim", "mlp_size"):
            if getattr(self, field) is not None:
                check.integer(name, field, getattr(self, field), least=1)
        check.flag(name, tied=self.tied)
        check.number(name, "norm_eps", self.norm_eps)
        _parse(self.pattern)
        if not isinstance(self.options, Mapping):
            raise TypeError(f"{name}: options must map mixers to their options, got {type(self.options).__name__}")
        for mixer, options in self.options.items():
            _check_options(mixer, options)
        owned = {ALIASES.get(mixer, mixer): dict(options) for mixer, options in self.options.items()}
        object.__setattr__(self, "options", owned)
        for mixer in dict.fromkeys((*self.layers, *owned)):
            self._check_mixer(mixer)

    @property
    def layers(self) -> tuple[str, ...]:
        """Name of each layer's mixer."""
        period = _parse(self.pattern)
        return tuple(period[i % len(period)] for i in range(self.num_layers))

    def mixer(self, name: str, *, backend: str | None = None) -> nn.Module:
        """A fresh mixer of that name, its operators on `backend`."""
        shared = ("hidden_size", "num_heads", "num_v_heads", "head_dim", "head_v_dim", "conv_size")
        known = inspect.signature(MIXERS[name]).parameters
        arguments = {field: getattr(self, field) for field in shared if field in known}
        if "backend" in known:  # softmax attention is PyTorch's own, on every device
            arguments["backend"] = backend
        return MIXERS[name](**arguments | dict(self.options.get(name, {})))

    def _check_mixer(self, name: str) -> None:
        """A mixer's own refusal, now and under the name of the field it comes from."""
        try:
            with torch.device("meta"):
                self.mixer(name)
        except (TypeError, ValueError) as error:
            argument, _, complaint = str(error).partition(": ")[2].partition(" ")
            field = argument
            if argument in self.options.get(name, {}):
                field = f"options[{name!r}][{argument!r}]"
            elif not hasattr(self, argument):  # of a part of the mixer, which calls it by a shorter name
                field = f"options[{name!r}]: {argument}"
            raise type(error)(f"DecoderConfig: {field} {complaint}, in {name}") from error

    def to_json(self) -> str:
        """The fields as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> DecoderConfig:
        """The configuration that `to_json` wrote.

        Raises:
            ValueError: no JSON object, or a field this version does not know.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"DecoderConfig: text must be a JSON object, got {type(fields).__name__}")
        unknown = fields.keys() - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"DecoderConfig: fields must be known to this version, got {', '.join(sorted(unknown))}")
        return cls(**fields)


class Decoder(nn.Module):
    """The language model of a `DecoderConfig`.

    Args:
        config: What it is made of, and all that `save` keeps beside the weights.
        backend: Of every operator in its layers; belongs to this instance, not to the model. None for the table's
            choice; on CUDA "eager" has to be asked for.

    Example:
        >>> import torch
        >>> config = DecoderConfig(hidden_size=32, num_layers=2, pattern="gdn attention", num_heads=2, head_dim=16)
        >>> model = Decoder(config)
        >>> ids = torch.randint(256, (1, 9))
        >>> logits, loss = model(ids[:, :-1], labels=ids[:, 1:])
        >>> loss.backward()
        >>> model.generate(ids, 5, temperature=0).shape
        torch.Size([1, 14])
    """

    def __init__(self, config: DecoderConfig, *, backend: str | None = None):
        super().__init__()
        if not isinstance(config, DecoderConfig):
            raise TypeError(f"Decoder: config must be a DecoderConfig, got {type(config).__name__}")
        check.choice("Decoder", "backend", backend, (None, *table.BACKENDS))
        self.config, self.backend = config, backend
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, name, backend) for name in config.layers)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Matrices normal, of deviation 0.02; the deeper the model, the smaller those that write into its stream."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                writers = 2 * len(self.blocks) if name.endswith((".mixer.out", ".mlp.out")) else 1
                nn.init.normal_(module.weight, std=0.02 / writers**0.5)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        *,
        layout: SequenceLayout | None = None,
        cache: DecodingCache | PooledCache | None = None,
        cp_context: ContextParallel | None = None,
        places: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of each next token, and their loss.

        Args:
            ids: [B, T] integer.
            labels: [B, T] int64. The token that follows ids[b, t], given by the caller; -100 where there is none to
                learn, as at the end of a packed document. Rows past the layout's last boundary never count.
            layout: Boundaries of packed documents, for which B is 1; no layer looks over one.
            cache: From `new_cache`, or to serve from `new_pools(..).at`; ids go on where it stands, and it moves on.
            cp_context: From `wyfold.cp.build_cp_context`, in the place of layout and cache: ids and labels are this
                rank's share of the tokens, cut from those of all by `cp_context.shard`.
            places: [B, n] int64. The places t of each row whose logits are wanted, where few are; labels are then
                [B, n], theirs. Without layout and cp_context.

        Returns:
            logits: [B, T, vocab_size], dtype of the parameters; [B, n, vocab_size] with places.
            loss: Mean cross entropy in nats over the labels that count, 0 if none does; float32. None without labels.
                With a cp_context this rank's share of it: the sum over its labels by the count of all ranks' labels,
                so that what ranks return, and the gradients they get, add up to the one loss and its gradients.

        Raises:
            ValueError: arguments that do not fit together.
        """
        self._check(ids, layout, cache)
        if cp_context is not None and (layout is not None or cache is not None):
            given = "a layout" if layout is not None else "a cache"
            raise ValueError(f"Decoder: cp_context must come without layout and cache, got {given}")
        if places is not None:
            if layout is not None or cp_context is not None:
                given = "a layout" if layout is not None else "a cp_context"
                raise ValueError(f"Decoder: places must come without layout and cp_context, got {given}")
            if check.tensor("Decoder", "places", places).ndim != 2 or places.shape[0] != ids.shape[0]:
                raise ValueError(f"Decoder: places must be [B, n], B = {ids.shape[0]}, got {list(places.shape)}")
            check.floating("Decoder", (torch.int64,), places=places)
        if labels is not None:
            wanted = ids if places is None else places
            if check.tensor("Decoder", "labels", labels).shape != wanted.shape:
                form = "[B, T]" if places is None else "[B, n]"
                raise ValueError(f"Decoder: labels must be {form} = {list(wanted.shape)}, got {list(labels.shape)}")
            check.floating("Decoder", (torch.int64,), labels=labels)
        hidden = self._hidden(ids, layout, cache, cp_context)
        if places is not None:
            hidden = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = self._logits(hidden)
        return logits, None if labels is None else _cross_entropy(logits, labels, layout, cp_context)

    def recompute(self, what: str | None) -> None:
        """What a training step computes again in its backward, in order to keep less: memory for time, the same bits.

        Args:
            what: None for nothing. "blocks": each block keeps its input alone. "selective": it keeps what its
                recurrence and its attention returned besides, and computes again projections, norms and MLP.

        Raises:
            ValueError: what is none of these.
        """
        check.choice("Decoder.recompute", "what", what, (None, *RECOMPUTED))
        for block in self.blocks:
            block.recomputed = what  # type: ignore[assignment]

    def new_cache(self, batch_size: int) -> DecodingCache:
        """A cache with which `batch_size` sequences start."""
        return DecodingCache([{} for _ in self.blocks], batch_size)

    def new_pools(self, slots: int) -> DecodingPools:
        """Room for the states of so many sequences, updated in place by calls that name their slots.

        Raises:
            ValueError: a layer is not of the delta family.
        """
        for name, block in zip(self.config.layers, self.blocks, strict=True):
            if not hasattr(block.mixer, "new_pool"):
                raise ValueError(f"Decoder.new_pools: pattern must hold layers of the delta family alone, got {name}")
        return DecodingPools([block.mixer.new_pool(slots) for block in self.blocks])  # type: ignore[operator,union-attr]

    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        stop: int | None = None,
    ) -> Tensor:
        """The prompts with what follows them; arguments and errors as in `stream`.

        Returns:
            ids: [B, T + n], n <= max_new_tokens; a row that stopped is filled up with `stop`.
        """
        tokens = self.stream(
            ids,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            generator=generator,
            stop=stop,
        )
        return torch.cat([ids, *(token[:, None].to(ids.dtype) for token in tokens)], dim=1)

    def stream(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        stop: int | None = None,
        layout: SequenceLayout | None = None,
        shared_draws: bool = False,
    ) -> Iterator[Tensor]:
        """Tokens that follow the prompts, each as soon as it is drawn.

        Prompts are read in pieces of 2,048 tokens by the chunk forms, so a long one takes no more activations than a
        piece; each token is one step of the recurrences. Attention without a window keeps every key; nothing else
        that is kept grows. On a GPU, a model of the delta family alone keeps its states in pools that are updated in
        place, and from the third token on a step is the replay of a CUDA graph.

        Args:
            ids: [B, T] integer. Prompts of one length, at least one token; or of any lengths, packed [1, T].
            max_new_tokens: Most tokens to draw.
            temperature: Logits are divided by it; 0 takes the likeliest token.
            top_k: Draw among the k likeliest.
            top_p: Draw among the likeliest that together hold this probability, in (0, 1].
            seed: Of the draws; None draws from `generator`, or from PyTorch's own.
            generator: On the device of the model.
            stop: Token that ends a row; the stream ends when every row has drawn it.
            layout: Boundaries of packed prompts, none of them empty. Waits for its device once.
            shared_draws: Every row draws by the same random numbers, those of a prompt that is alone: what follows a
                prompt does not depend on the others.

        Yields:
            token: [N] int64, N = B, or the number of packed prompts.

        Raises:
            TypeError, ValueError: naming the argument, before anything runs.
        """
        name = "Decoder.generate"
        self._check(ids, layout, None)
        check.flag(name, shared_draws=shared_draws)
        if ids.shape[1] == 0:
            raise ValueError(f"{name}: ids must hold at least one token, got {list(ids.shape)}")
        lengths = None if layout is None else layout.lengths.tolist()
        if lengths is not None and min(lengths, default=0) == 0:
            raise ValueError(f"{name}: layout must have prompts of at least one token, got lengths {lengths}")
        check.integer(name, "max_new_tokens", max_new_tokens, least=0)
        if check.number(name, "temperature", temperature) < 0:
            raise ValueError(f"{name}: temperature must be at least 0, got {temperature}")
        if top_k is not None:
            check.integer(name, "top_k", top_k, least=1)
        if top_p is not None and not 0 < check.number(name, "top_p", top_p) <= 1:
            raise ValueError(f"{name}: top_p must be in (0, 1], got {top_p}")
        if seed is not None:
            if generator is not None:
                raise ValueError(f"{name}: seed must be None where a generator is given, got {seed}")
            generator = torch.Generator(ids.device).manual_seed(check.integer(name, "seed", seed, least=0))
        if stop is not None:
            check.integer(name, "stop", stop, least=0)
        draw = _Draw(temperature, top_k, top_p, generator, shared_draws)
        return self._stream(ids, lengths, max_new_tokens, draw, stop)

    @torch.inference_mode()
    def _stream(
        self, ids: Tensor, lengths: list[int] | None, max_new_tokens: int, draw: _Draw, stop: int | None
    ) -> Iterator[Tensor]:
        N = ids.shape[0] if lengths is None else len(lengths)
        pooled = ids.device.type == "cuda" and self.backend != "eager" and self._is_pooled
        cache: DecodingCache | PooledCache = self.new_pools(N).at() if pooled else self.new_cache(N)
        step: Callable[[Tensor], Tensor] = partial(self._step, cache)
        if pooled:
            step = Replay(step)
        logits = self._logits(self._read(ids, lengths, cache))
        stopped = torch.zeros(N, dtype=torch.bool, device=ids.device)
        for remaining in range(max_new_tokens, 0, -1):
            token = draw(logits)
            if stop is not None:
                token = torch.where(stopped, stop, token)
                stopped = stopped | (token == stop)
            yield token
            if remaining == 1 or (stop is not None and bool(stopped.all())):
                return
            logits = step(token)

    def _step(self, cache: DecodingCache | PooledCache, token: Tensor) -> Tensor:
        """Logits [N, vocab_size] behind one more token [N] of each sequence."""
        return self._logits(self._hidden(token[:, None], None, cache)[:, -1])

    def _read(self, ids: Tensor, lengths: list[int] | None, cache: DecodingCache | PooledCache) -> Tensor:
        """Hidden states [N, hidden_size] behind the prompts, which are read piece by piece."""
        if lengths is None:
            for part in ids.split(PREFILL_TOKENS, dim=1):
                hidden = self._hidden(part, None, cache)
            return hidden[:, -1]
        begins = [0, *accumulate(lengths)]
        share = max(PREFILL_GRID, PREFILL_TOKENS // len(lengths) // PREFILL_GRID * PREFILL_GRID)
        behind = ids.new_empty(len(lengths), self.config.hidden_size, dtype=self.embedding.weight.dtype)
        for first in range(0, max(lengths), share):
            sizes = [min(max(length - first, 0), share) for length in lengths]
            rows = [ids[:, begin + first : begin + first + size] for begin, size in zip(begins, sizes) if size]
            layout = SequenceLayout.from_lengths(sizes, device=ids.device)
            hidden = self._hidden(torch.cat(rows, 1), layout, cache)
            ended = [n for n, size in enumerate(sizes) if size and first + size == lengths[n]]
            ends = list(accumulate(sizes))
            behind[ended] = hidden[0, [ends[n] - 1 for n in ended]]
        return behind

    @property
    def _is_pooled(self) -> bool:
        """Whether every layer can keep its states in a pool."""
        return all(hasattr(block.mixer, "new_pool") for block in self.blocks)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `config.json` and `model.safetensors` into a folder, each whole or not at all.

        Raises:
            ImportError: safetensors is missing.
        """
        safetensors = _safetensors()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: x.detach().contiguous() for name, x in self.state_dict().items()}
        unfinished = folder / f"{WEIGHTS_FILE}.part"
        safetensors.save_file(tensors, unfinished)
        unfinished.replace(folder / WEIGHTS_FILE)
        unfinished = folder / f"{CONFIG_FILE}.part"
        unfinished.write_text(self.config.to_json(), encoding="utf-8")
        unfinished.replace(folder / CONFIG_FILE)

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], *, device: torch.device | str = "cpu", backend: str | None = None
    ) -> Decoder:
        """The decoder that `save` wrote, in the dtype it had.

        Args:
            folder: Holds `config.json` and `model.safetensors`.
            device: Of the parameters.
            backend: As for a new decoder; none was saved.

        Raises:
            ImportError: safetensors is missing.
            FileNotFoundError: the folder holds no decoder.
            ValueError: the configuration, or the tensors, are not those of a decoder of this version.
        """
        safetensors = _safetensors()
        folder = Path(folder)
        config = DecoderConfig.from_json((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = safetensors.load_file(folder / WEIGHTS_FILE, device=str(device))
        with torch.device("meta"):
            model = cls(config, backend=backend)
        try:
            model.load_state_dict(tensors, assign=True)
        except RuntimeError as error:
            path = folder / WEIGHTS_FILE
            raise ValueError(f"Decoder.load: {path} must hold what {CONFIG_FILE} describes; {error}") from error
        return model

    def _check(self, ids: Tensor, layout: SequenceLayout | None, cache: DecodingCache | PooledCache | None) -> None:
        B, T = check.shapes("Decoder", ids=(ids, "B T")).values()
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"Decoder: ids must be int32 or int64, got {str(ids.dtype).removeprefix('torch.')}")
        if layout is not None and not isinstance(layout, SequenceLayout):
            raise TypeError(f"Decoder: layout must be a SequenceLayout or None, got {type(layout).__name__}")
        if layout is not None and (B, T) != (1, layout.tokens):
            wanted = [1, layout.tokens]
            raise ValueError(f"Decoder: ids must be [1, T] = {wanted} for its layout, got {list(ids.shape)}")
        if cache is None:
            return
        if not isinstance(cache, DecodingCache | PooledCache):
            raise TypeError(
                f"Decoder: cache must be a DecodingCache, a PooledCache or None, got {type(cache).__name__}"
            )
        if len(cache.layers) != len(self.blocks):
            raise ValueError(f"Decoder: cache must have {len(self.blocks)} layers, got {len(cache.layers)}")
        N = B if layout is None else layout.max_seqs
        if cache.batch_size != N:
            raise ValueError(f"Decoder: cache must hold the {N} sequences of ids, got {cache.batch_size}")

    def _hidden(
        self,
        ids: Tensor,
        layout: SequenceLayout | None,
        cache: DecodingCache | PooledCache | None,
        cp_context: ContextParallel | None = None,
    ) -> Tensor:
        x = self.embedding(ids)
        caches: Sequence[Any] = [None] * len(self.blocks) if cache is None else cache.layers
        for block, layer_cache in zip(self.blocks, caches, strict=True):
            x = block(x, layout, layer_cache, cp_context)
        return self.norm(x)

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding.weight if self.head is None else self.head.weight)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    recomputed: str | None = None  # by the backward, as `Decoder.recompute` says it

    def __init__(self, config: DecoderConfig, name: str, backend: str | None):
        super().__init__()
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mixer = config.mixer(name, backend=backend)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.mlp_size or -(-config.hidden_size // 6) * 16)

    def forward(
        self,
        x: Tensor,
        layout: SequenceLayout | None,
        cache: LayerCache | LayerPool | None,
        cp_context: ContextParallel | None = None,
    ) -> Tensor:
        if self.recomputed is None or cache is not None or not torch.is_grad_enabled():
            return self._mixed(x, layout, cache, cp_context)
        # Inside the block's own call, so that what shards its parameters gathers them before they are used again.
        context = (
            partial(create_selective_checkpoint_contexts, _kept) if self.recomputed == "selective" else noop_context_fn
        )
        return checkpoint(self._mixed, x, layout, None, cp_context, use_reentrant=False, context_fn=context)

    def _mixed(
        self,
        x: Tensor,
        layout: SequenceLayout | None,
        cache: LayerCache | LayerPool | None,
        cp_context: ContextParallel | None,
    ) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), layout=layout, cache=cache, cp_context=cp_context)
        return x + self.mlp(self.mlp_norm(x))


def _kept(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """What selective checkpointing keeps of a block: the results of its one sequential step."""
    kept = str(operator).rpartition(".")[0] in KEPT_RESULTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class SwiGLU(nn.Module):
    """W_o (silu(W_a x) * W_b x), W_a and W_b in one matrix."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.up = nn.Linear(width, 2 * inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


@dataclasses.dataclass(frozen=True)
class _Draw:
    """One token for each row of logits."""

    temperature: float
    top_k: int | None
    top_p: float | None
    generator: torch.Generator | None
    shared: bool = False

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        logits, tokens = (logits.float() / self.temperature).sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            logits = logits[:, : self.top_k]
        probability = logits.softmax(dim=-1)
        if self.top_p is not None:
            # A token stays while those before it hold less than top_p, so the likeliest always does.
            before = probability.cumsum(dim=-1) - probability
            probability = torch.where(before < self.top_p, probability, 0)
        if self.shared:  # what torch.multinomial does for one row, its random numbers for all of them
            waiting = torch.empty_like(probability[:1]).exponential_(generator=self.generator)
            rank = (probability / waiting).argmax(dim=-1, keepdim=True)
        else:
            rank = torch.multinomial(probability, 1, generator=self.generator)
        return tokens.gather(1, rank)[:, 0]


def _cross_entropy(
    logits: Tensor, labels: Tensor, layout: SequenceLayout | None, cp_context: ContextParallel | None
) -> Tensor:
    if layout is not None:
        labels = torch.where(layout.sequence_ids >= 0, labels, IGNORED)
    if cp_context is not None:
        labels = torch.where(cp_context.sequence_ids(labels.device) >= 0, labels, IGNORED)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    counted = (labels != IGNORED).sum()
    if cp_context is not None:
        counted = cp_context.gather(counted).sum()
    return total / counted.clamp(min=1)


def _parse(pattern: str) -> tuple[str, ...]:
    """One period of a pattern: canonical names, in order."""
    if not isinstance(pattern, str):
        raise TypeError(f"DecoderConfig: pattern must be a str, got {type(pattern).__name__}")
    period: list[str] = []
    for entry in pattern.split():
        name, star, count = entry.partition("*")
        if star and not (count.isdecimal() and int(count) > 0):
            raise ValueError(f"DecoderConfig: pattern must have a count of at least 1 after a *, got {entry!r}")
        period += [_canonical("pattern", name)] * (int(count) if star else 1)
    if not period:
        raise ValueError(f"DecoderConfig: pattern must name at least one mixer, got {pattern!r}")
    return tuple(period)


def _canonical(field: str, name: str) -> str:
    """A mixer's name without aliases."""
    name = ALIASES.get(name, name)
    if name not in MIXERS:
        raise ValueError(f"DecoderConfig: {field} must name {', '.join((*MIXERS, *ALIASES))}, got {name!r}")
    return name


def _check_options(mixer: str, options: Mapping[str, Any]) -> None:
    name = _canonical("options", mixer)
    if not isinstance(options, Mapping):
        raise TypeError(f"DecoderConfig: options[{mixer!r}] must map names to values, got {type(options).__name__}")
    elsewhere = ("hidden_size", "backend")  # one for all layers; and the decoder's own, which no configuration keeps
    known = [option for option in inspect.signature(MIXERS[name]).parameters if option not in elsewhere]
    for option in options:
        if option not in known:
            raise ValueError(f"DecoderConfig: options[{mixer!r}] must be among {', '.join(known)}, got {option!r}")


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("Decoder.save and Decoder.load need safetensors: pip install 'wyfold[cli]'") from error
    return safetensors.torch
