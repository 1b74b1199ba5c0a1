"""The decoder: embedding, blocks, norm, output matrix; its loss, and its ways into generation and onto a disk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wyfold.context_parallel import collectives
from wyfold.context_parallel.context import ContextParallel
from wyfold.kernels import table
from wyfold.layers.cache import DecodingCache, DecodingPools, LayerCache, PooledCache
from wyfold.layers.initial import set_normal_initial
from wyfold.models import disk
from wyfold.models.block import Block
from wyfold.models.config import DecoderConfig
from wyfold.models.generation import Draw, continued
from wyfold.ops.rank_agreement import ranks_agree
from wyfold.runtime import check
from wyfold.runtime.choices import RECOMPUTED
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.torch_ops import autocast_dtype

_SHORT = 60  # characters of a setting, in a message
IGNORED = -100  # a label that counts for nothing, as in torch.nn.functional.cross_entropy


class Decoder(nn.Module):
    """The language model of a `DecoderConfig`.

    Args:
        config: What it is made of, and all that `save` keeps beside the weights.
        backend: Of every operator in its layers; belongs to this instance, not to the model. None for the table's
            choice; on CUDA "eager" has to be asked for.

    Examples:
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
        embedding = TiedEmbedding if config.tied else nn.Embedding
        self.embedding = embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, name, backend) for name in config.layers)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                writers = 2 * len(self.blocks) if name.endswith((".mixer.out", ".mlp.out")) else 1
                set_normal_initial(module, std=0.02 / writers**0.5)
                module.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every parameter as a new decoder's: `reset_parameters` of every module, in any order.

        Matrices are normal, of deviation 0.02, divided by sqrt(2 num_layers) for those that write into the residual
        stream; biases are zeros; norms, filters and decays start as their layers say.
        """
        for module in self.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if module is not self and reset is not None:
                reset()

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
                [B, n], theirs. Without cp_context.

        Returns:
            logits: [B, T, vocab_size], dtype of the parameters; [B, n, vocab_size] with places.
            loss: Mean cross entropy in nats over the labels that count, 0 if none does; float32. None without labels.
                With a cp_context this rank's share of it: the sum over its labels by the count of all ranks' labels,
                so that what ranks return, and the gradients they get, add up to the one loss and its gradients.

        Raises:
            ValueError: arguments that do not fit together; on the CPU, or inside `checked`, ids and labels that are no
                tokens, and places beyond a row. With a cp_context, what one rank refuses and what differs between ranks
                is raised on all of them in the first call of each kind; later by the rank that refuses alone, unless
                the context was made with check="always".
        """
        if cp_context is None:
            self._check_call(ids, labels, layout, cache, cp_context, places)
            hidden = self._hidden(ids, layout, cache)
        else:
            hidden = self._hidden_across(ids, labels, layout, cache, cp_context, places)
        if places is not None:
            hidden = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = self._logits(hidden)
        return logits, None if labels is None else _cross_entropy(logits, labels, layout, cp_context, places)

    def _check_call(
        self,
        ids: Tensor,
        labels: Tensor | None,
        layout: SequenceLayout | None,
        cache: DecodingCache | PooledCache | None,
        cp_context: ContextParallel | None,
        places: Tensor | None,
    ) -> None:
        """Refuse arguments of `forward` that do not fit together."""
        self._check(ids, layout, cache)
        if cp_context is not None and (layout is not None or cache is not None):
            given = "a layout" if layout is not None else "a cache"
            raise ValueError(f"Decoder: cp_context must come without layout and cache, got {given}")
        if cp_context is not None:
            cp_context.check_tokens("Decoder", ids, "ids")
        if places is not None:
            if cp_context is not None:
                raise ValueError("Decoder: places must come without cp_context, got one")
            if check.tensor("Decoder", "places", places).ndim != 2 or places.shape[0] != ids.shape[0]:
                raise ValueError(f"Decoder: places must be [B, n], B = {ids.shape[0]}, got {list(places.shape)}")
            check.floating("Decoder", (torch.int64,), places=places)
            _require_inside("places", places, ids.shape[1])
        if labels is not None:
            wanted = ids if places is None else places
            if check.tensor("Decoder", "labels", labels).shape != wanted.shape:
                form = "[B, T]" if places is None else "[B, n]"
                raise ValueError(f"Decoder: labels must be {form} = {list(wanted.shape)}, got {list(labels.shape)}")
            check.floating("Decoder", (torch.int64,), labels=labels)
            _require_inside("labels", labels, self.config.vocab_size, f"or {IGNORED}")

    def _hidden_across(
        self,
        ids: Tensor,
        labels: Tensor | None,
        layout: SequenceLayout | None,
        cache: DecodingCache | PooledCache | None,
        cp_context: ContextParallel,
        places: Tensor | None,
    ) -> Tensor:
        """`_hidden` of this rank's share, once all ranks are known to call the same model alike.

        They compare once for all layers: what these do follows from the model and from what is compared here.
        """

        def check_call() -> None:
            self._check_call(ids, labels, layout, cache, cp_context, places)

        kind = repr(self.config), labels is not None
        ranks_agree("Decoder", cp_context, ids, check_call, lambda _: self._alike_on_ranks(ids, labels), module=kind)
        if torch.compiler.is_compiling():
            return self._hidden(ids, None, None, cp_context)
        with cp_context.skip_comparison():
            return self._hidden(ids, None, None, cp_context)

    def _alike_on_ranks(self, ids: Tensor, labels: Tensor | None) -> dict[str, object]:
        """What must be equal on all ranks of a call."""
        parameters = tuple((x.shape, x.dtype, x.requires_grad) for x in self.parameters())
        return {
            "B": ids.shape[0],
            "labels given": labels is not None,
            **{f"config.{name}": collectives.short(value, _SHORT) for name, value in vars(self.config).items()},
            "the parameters": _summary(parameters),
            "the dtype of autocast": autocast_dtype(ids.device.type),
            "requires_grad": torch.is_grad_enabled() and any(requires_grad for _, _, requires_grad in parameters),
            "recompute": ", ".join(dict.fromkeys(str(getattr(block, "recomputed", None)) for block in self.blocks)),
            "checked() open": check.checking_contents(),
        }

    def recompute(self, what: str | None) -> None:
        """What a training step computes again in its backward, in order to keep less: memory for time, the same bits.

        Args:
            what: None for nothing. "blocks": each block keeps its input alone. "selective": it keeps what its
                recurrence and its attention returned besides, and computes again projections, norms and MLP. Inside of
                `torch.compile`, PyTorch 2.11 keeps for "blocks" what it keeps for "selective".

        Raises:
            ValueError: what is none of these, or something else has taken the place of a block.
        """
        check.choice("Decoder.recompute", "what", what, (None, *RECOMPUTED))
        # The blocks themselves: an attribute of a wrapper around one (torch.compile, FSDP, checkpoints) says nothing.
        blocks = [module for module in self.modules() if isinstance(module, Block)]
        if len(blocks) != self.config.num_layers:
            raise ValueError(
                f"Decoder.recompute: the decoder must hold its {self.config.num_layers} blocks, wrapped or not, "
                f"found {len(blocks)}; call it before blocks are replaced"
            )
        for block in blocks:
            block.recomputed = what

    def new_cache(self, batch_size: int) -> DecodingCache:
        """A cache with which `batch_size` sequences start."""
        return DecodingCache([LayerCache() for _ in self.blocks], batch_size)

    def new_pools(
        self, slots: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> DecodingPools:
        """Zeroed states of so many sequences, updated in place by calls that name their slots.

        Args:
            slots: Sequences the pools have room for.
            device: None: that of the parameters.
            dtype: Of the convolutions' inputs; None: that of the parameters. To be given where a wrapper computes in
                another one, as FSDP2 does with a mixed precision policy. States are at least float32.

        Raises:
            ValueError: a layer is not of the delta family, or the parameters are offloaded and no device is given.
        """
        for name, block in zip(self.config.layers, self.blocks, strict=True):
            if not hasattr(block.mixer, "new_pool"):
                raise ValueError(f"Decoder.new_pools: pattern must hold layers of the delta family alone, got {name}")
        mixers: list[Any] = [block.mixer for block in self.blocks]
        return DecodingPools([mixer.new_pool(slots, device=device, dtype=dtype) for mixer in mixers])

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
            seed: Of the draws, below 2**64; None draws from `generator`, or from PyTorch's own.
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
            check.integer(name, "seed", seed, least=0, most=2**64 - 1)
            generator = torch.Generator(ids.device).manual_seed(seed)
        if stop is not None:
            check.integer(name, "stop", stop, least=0, most=self.config.vocab_size - 1)
        draw = Draw(temperature, top_k, top_p, generator, shared_draws)
        return continued(self, ids, lengths, max_new_tokens, draw, stop)

    def save(self, folder: str | os.PathLike[str], *, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write `config.json` and `model.safetensors` into a folder, each whole or not at all.

        Args:
            folder: Created if it is missing.
            state_dict: The decoder's tensors, gathered from wherever they are. None: the decoder's own, which have to
                be ordinary tensors under the decoder's own names: neither sharded nor offloaded nor adapted. Those of a
                subclass that is not built from a configuration alone are written under the names they have; its `load`
                is its own.

        Raises:
            ImportError: safetensors is missing.
            ValueError: tensors that `load` could not read, before anything is written.
            OSError: a file cannot be written; an earlier one of its name is as it was.
        """
        tensors = self.state_dict() if state_dict is None else state_dict
        disk.write(Path(folder), self.config, self._loadable(tensors))

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
            ValueError: a file is damaged, or the tensors are not those that the configuration describes; names the
                file and what is wrong. Nothing is built or read before that is known.
        """
        config, infos = disk.read_header(Path(folder))
        with torch.device("meta"):
            model = cls(config, backend=backend)
        disk.require_same(Path(folder), infos, model.state_dict())
        model.load_state_dict(disk.read(Path(folder), device), assign=True)
        return model

    def _check(self, ids: Tensor, layout: SequenceLayout | None, cache: DecodingCache | PooledCache | None) -> None:
        B, T = check.shapes("Decoder", ids=(ids, "B T")).values()
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"Decoder: ids must be int32 or int64, got {str(ids.dtype).removeprefix('torch.')}")
        _require_inside("ids", ids, self.config.vocab_size)
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
        if self.head is not None:
            return self.head(hidden)
        if (
            "base_layer" in self.embedding._modules
        ):  # peft's way to hold what it adapts; it knows embeddings of ids only
            raise ValueError(
                "Decoder: embedding must not be adapted where it is the output matrix as well; "
                "take it out of the adapter's target modules, or use a decoder with tied=False"
            )
        return self.embedding(hidden, readout=True)

    def _loadable(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors under the names that `load` expects, if they are all there and hold numbers."""
        expected = self._expected()
        found = {name.replace("_orig_mod.", ""): x for name, x in tensors.items()}  # of compiled parts
        named = "Decoder.save: state_dict"
        for wrong, what in ((expected.keys() - found.keys(), "hold"), (found.keys() - expected.keys(), "not hold")):
            if wrong:
                raise ValueError(
                    f"{named} must {what} {min(wrong)} ({len(wrong)} such names); modules that adapters or wrappers "
                    "replaced have other names: merge or unwrap them, or pass state_dict= with the decoder's own"
                )
        for name, x in found.items():
            if x.shape != expected[name].shape:
                raise ValueError(f"{named} must hold {name} {list(expected[name].shape)}, got {list(x.shape)}")
            if type(x) not in (Tensor, nn.Parameter) or x.device.type == "meta":
                kind = "one on the meta device" if x.device.type == "meta" else f"a {type(x).__name__}"
                raise ValueError(
                    f"{named} must hold ordinary tensors, got {kind} for {name}; gather what is sharded or offloaded "
                    "(torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True, "
                    "wyfold.integrations.dtensor.whole, accelerate.utils.modeling.get_state_dict_offloaded_model) and "
                    "pass it as state_dict= from one process"
                )
        return found

    def _expected(self) -> dict[str, Tensor]:
        """Tensors that `load` expects, by name: of a new decoder, or those here if the class needs other arguments."""
        with torch.device("meta"):
            if type(self).__init__ is Decoder.__init__:
                return type(self)(self.config).state_dict()
            try:
                new = type(self)(self.config)
            except Exception:  # what a subclass's constructor raises for arguments that it does not know
                new = None
        if new is None or new.config != self.config:
            new = self
        return {name.replace("_orig_mod.", ""): x for name, x in new.state_dict().items()}


class TiedEmbedding(nn.Embedding):
    """An embedding whose matrix is the output matrix as well.

    Both uses are calls of this module, so that whatever gathers, moves, casts or adapts its weight does so for both.
    """

    def forward(self, x: Tensor, *, readout: bool = False) -> Tensor:
        """Vectors of token ids, [B, T] -> [B, T, D]; with `readout` logits of hidden states, [B, T, D] -> [B, T, V]."""
        return F.linear(x, self.weight) if readout else super().forward(x)


def _require_inside(name: str, x: Tensor, size: int, besides: str = "") -> None:
    """Of numbers on a GPU, which are not waited for, PyTorch's kernels say it."""
    if not check.readable(x):
        return
    kept = x[x != IGNORED] if besides else x
    if kept.numel() == 0:
        return
    least, most = (int(i) for i in kept.aminmax())
    if least < 0 or most >= size:
        allowed = f"[0, {size}) {besides}".rstrip()
        raise ValueError(f"Decoder: {name} must be in {allowed}, got {least if least < 0 else most}")


@lru_cache(maxsize=64)
def _summary(parameters: tuple[tuple[torch.Size, torch.dtype, bool], ...]) -> str:
    """Shapes, dtypes and requires_grad of parameters as ranks compare them."""
    numbers = sum(shape.numel() for shape, _, _ in parameters)
    dtypes = ", ".join(sorted({str(dtype).removeprefix("torch.") for _, dtype, _ in parameters}))
    return f"{len(parameters)} of {numbers} numbers, {dtypes} ({collectives.digest(repr(parameters))})"


def _cross_entropy(
    logits: Tensor,
    labels: Tensor,
    layout: SequenceLayout | None,
    cp_context: ContextParallel | None,
    places: Tensor | None,
) -> Tensor:
    if layout is not None:
        inside = layout.sequence_ids >= 0
        labels = torch.where(inside if places is None else inside[places], labels, IGNORED)
    if cp_context is not None:
        labels = torch.where(cp_context.sequence_ids(labels.device) >= 0, labels, IGNORED)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    counted = (labels != IGNORED).sum()
    if cp_context is not None:
        counted = cp_context.all_gather(counted).sum()
    return total / counted.clamp(min=1)
