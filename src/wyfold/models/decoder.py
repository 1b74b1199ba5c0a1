"""The decoder: embedding, blocks, norm and output matrix; with loss, generation, save and load."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wyfold.context_parallel.context import ContextParallel
from wyfold.kernels import table
from wyfold.layers.cache import DecodingCache, LayerCache
from wyfold.layers.initial import set_normal_initial
from wyfold.layers.pools import DecodingPools, PooledCache
from wyfold.models import disk
from wyfold.models.block import Block
from wyfold.models.config import DecoderConfig
from wyfold.models.decoder_call import alike_on_ranks, check_call, check_ids, cross_entropy
from wyfold.models.generation import Draw, continued
from wyfold.ops.rank_agreement import ranked_call
from wyfold.runtime import check
from wyfold.runtime.choices import RECOMPUTED
from wyfold.runtime.layout import SequenceLayout


class Decoder(nn.Module):
    """Language model described by a `DecoderConfig`.

    Args:
        config: Configuration; `save` stores it with the weights.
        backend: Backend of every operator in the layers; not stored by `save`. None: the best available one, which on
            CUDA is never "eager".

    Raises:
        TypeError: config is not a DecoderConfig.
        ValueError: backend is unknown.

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
        self.blocks = nn.ModuleList(Block(config, number, name, backend) for number, name in enumerate(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                writers = 2 * len(self.blocks) if name.endswith((".mixer.out", ".mixer.o_proj", ".mlp.out")) else 1
                set_normal_initial(module, std=0.02 / writers**0.5)
                module.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every parameter as in a new decoder, by `reset_parameters` of every module in any order.

        Matrices are normal with standard deviation 0.02, divided by sqrt(2 num_layers) for those that write to the
        residual stream. Biases are zeros. Layers define the initial norms, filters and decays.
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
        """Compute next-token logits, and the loss if labels are given.

        Args:
            ids: [B, T] integer.
            labels: [B, T] int64. The token that follows ids[b, t], chosen by the caller; -100 for positions without a
                loss, such as the end of a packed document. Rows past the layout's last boundary never count.
            layout: Boundaries of packed documents, for which B is 1. No information crosses a boundary.
            cache: From `new_cache`, or for serving from `new_pools(..).at`. The call continues from it and updates it.
            cp_context: From `wyfold.cp.build_cp_context`, instead of layout and cache. ids and labels are this rank's
                shard of the tokens, made by `cp_context.shard`.
            places: [B, n] int64. Positions t of each row whose logits to compute, if not all; labels are then [B, n].
                Not with cp_context.

        Returns:
            logits: [B, T, vocab_size], dtype of the parameters; [B, n, vocab_size] with places.
            loss: Mean cross entropy in nats over the labels other than -100, 0 if there are none; float32. None without
                labels. With a cp_context, this rank's share: the sum over its labels divided by the number of labels of
                all ranks. Losses and gradients of the ranks then sum to the loss and its gradient.

        Raises:
            TypeError: An argument has the wrong Python type.
            ValueError: Arguments do not fit together. On the CPU or inside `checked` also: ids or labels are not
                tokens, or places lie outside a row. With a cp_context, an error of one rank, or a difference between
                ranks, is raised on all ranks in the first call of each kind. Later errors are raised on one rank only,
                unless the context has check="always".
        """
        if cp_context is None:
            check_call(self, ids, labels, layout, cache, cp_context, places)
            hidden = self._hidden(ids, layout, cache)
        else:
            hidden = self._hidden_across(ids, labels, layout, cache, cp_context, places)
        if places is not None:
            hidden = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = self._logits(hidden)
        return logits, None if labels is None else cross_entropy(logits, labels, layout, cp_context, places)

    def _hidden_across(
        self,
        ids: Tensor,
        labels: Tensor | None,
        layout: SequenceLayout | None,
        cache: DecodingCache | PooledCache | None,
        cp_context: ContextParallel,
        places: Tensor | None,
    ) -> Tensor:
        """`_hidden` of this rank's shard, after ranks have compared model and call.

        One comparison serves all layers, whose calls follow from the compared properties.
        """
        with ranked_call("Decoder", cp_context, ids, module=(repr(self.config), labels is not None)) as ranked:
            check_call(self, ids, labels, layout, cache, cp_context, places)
        if ranked.compares:
            ranked.assert_same(alike_on_ranks(self, ids, labels))
        if torch.compiler.is_compiling():
            return self._hidden(ids, None, None, cp_context)
        with cp_context.agreement.skip():
            return self._hidden(ids, None, None, cp_context)

    def recompute(self, what: str | None) -> None:
        """Set activation checkpointing: less memory, more time, the same bits.

        Args:
            what: None: no recomputation. "blocks": a block saves only its input. "selective": a block also saves the
                results of its recurrence or attention, and recomputes projections, norms and MLP. Inside
                `torch.compile`, PyTorch 2.11 saves the same for "blocks" as for "selective".

        Raises:
            ValueError: what is unknown, or a block was replaced by another module.
        """
        check.choice("Decoder.recompute", "what", what, (None, *RECOMPUTED))
        # Set the attribute on the blocks themselves, not on wrappers around them (torch.compile, FSDP, checkpoints).
        blocks = [module for module in self.modules() if isinstance(module, Block)]
        if len(blocks) != self.config.num_layers:
            raise ValueError(
                f"Decoder.recompute: the decoder must hold its {self.config.num_layers} blocks, wrapped or not, "
                f"found {len(blocks)}; call it before blocks are replaced"
            )
        for block in blocks:
            block.recomputed = what

    def new_cache(self, batch_size: int) -> DecodingCache:
        """An empty cache for `batch_size` sequences."""
        return DecodingCache([LayerCache() for _ in self.blocks], batch_size)

    def new_pools(
        self, slots: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> DecodingPools:
        """Allocate zero-filled pools for serving, which calls update in place at given slots.

        Args:
            slots: Number of sequences the pools hold.
            device: None: that of the parameters.
            dtype: Dtype of the convolutions' inputs. None: that of the parameters. Required if a wrapper computes in
                another one, as FSDP2 does with a mixed precision policy. States are at least float32.

        Raises:
            TypeError: slots is not an int.
            ValueError: slots < 1, a layer is not of the delta family, or the parameters are offloaded and no device is
                given.
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
        """Generate a continuation of each prompt.

        Args:
            ids: [B, T] integer, T >= 1. Prompts of one length.
            max_new_tokens, temperature, top_k, top_p, seed, generator, stop: As in `stream`.

        Returns:
            ids: [B, T + n], n <= max_new_tokens; a row that stopped is padded with `stop`.

        Raises:
            TypeError: An argument has the wrong type; the message names it.
            ValueError: An argument has a wrong shape or value; the message names it.
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
        """Generate token by token, yielding each as soon as it is sampled.

        Prompts are prefilled in pieces of 2,048 tokens by the chunk forms, which bounds the memory of activations; each
        new token is one step of the recurrences. Only the cache of attention without a window grows. On a GPU, a model
        with delta-family layers only keeps its states in pools, and from the third token on each step replays a CUDA
        graph.

        Args:
            ids: [B, T] integer, T >= 1. Prompts of one length; or prompts of any lengths, packed [1, T] with layout.
            max_new_tokens: Maximal number of tokens to generate.
            temperature: Divisor of the logits; 0 selects the likeliest token.
            top_k: Sample among the k likeliest. None: all.
            top_p: Sample among the likeliest that together have this probability, in (0, 1]. None: all.
            seed: Seed of the sampling, below 2**64. None: use `generator`, or PyTorch's default generator.
            generator: Random generator on the model's device.
            stop: Token that ends a row; the stream ends when every row has produced it.
            layout: Boundaries of packed prompts, none of them empty. Synchronises with its device once.
            shared_draws: All rows use the random numbers of a single row, so that a prompt's continuation does not
                depend on the others.

        Yields:
            token: [N] int64, N = B, or the number of packed prompts.

        Raises:
            TypeError: An argument has the wrong type; the message names it. Raised before anything runs.
            ValueError: An argument has a wrong shape or value; the message names it. Raised before anything runs.
        """
        name = "Decoder.generate"
        check_ids(self, ids, layout, None)
        check.flag(name, shared_draws=shared_draws)
        if ids.numel() == 0:
            raise ValueError(f"{name}: ids must hold at least one token, got {list(ids.shape)}")
        lengths = None if layout is None else layout.lengths.tolist()
        if lengths is not None and min(lengths, default=0) == 0:
            raise ValueError(f"{name}: layout must have prompts of at least one token, got lengths {lengths}")
        check.integer(name, "max_new_tokens", max_new_tokens, least=0)
        temperature = check.number(name, "temperature", temperature)
        if temperature < 0:
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
        """Write `config.json` and `model.safetensors` into a folder, each atomically.

        Args:
            folder: Created if missing.
            state_dict: The decoder's tensors, gathered by the caller. None: the decoder's own, which must be ordinary
                tensors under the decoder's names, not sharded, offloaded or adapted. For a subclass with further
                constructor arguments, any names are written; the subclass must define its own `load`.

        Raises:
            ImportError: safetensors is not installed.
            TypeError: folder is no path.
            ValueError: `load` could not read the tensors; nothing is written.
            OSError: A file cannot be written; an earlier file of that name is unchanged.
        """
        tensors = self.state_dict() if state_dict is None else state_dict
        disk.write(_as_path("Decoder.save", folder), self.config, disk.loadable(tensors, self._expected()))

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], *, device: torch.device | str = "cpu", backend: str | None = None
    ) -> Decoder:
        """Load a decoder written by `save`, in its stored dtype.

        Args:
            folder: Folder with `config.json` and `model.safetensors`.
            device: Device of the parameters.
            backend: As for a new decoder.

        Raises:
            ImportError: safetensors is not installed.
            TypeError: folder is no path.
            FileNotFoundError: The folder holds no decoder.
            ValueError: A file is damaged, or the tensors do not match the configuration; the message names the file.
                Raised before the model is built or tensors are read.
        """
        path = _as_path("Decoder.load", folder)
        config, infos = disk.read_header(path)
        with torch.device("meta"):
            model = cls(config, backend=backend)
        disk.require_same(path, infos, model.state_dict())
        model.load_state_dict(disk.read(path, device), assign=True)
        return model

    def _hidden(
        self,
        ids: Tensor,
        layout: SequenceLayout | None,
        cache: DecodingCache | PooledCache | None,
        cp_context: ContextParallel | None = None,
    ) -> Tensor:
        x = self.embedding(ids)
        caches: Sequence[Any] = [None] * len(self.blocks) if cache is None else cache.layers
        first_value = None
        for block, layer_cache in zip(self.blocks, caches, strict=True):
            found = block(x, layout, layer_cache, cp_context, first_value)
            x, first_value = found if isinstance(found, tuple) else (found, first_value)
        return self.norm(x)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.head is not None:
            return self.head(hidden)
        if "base_layer" in self.embedding._modules:  # adapted by peft, which supports embeddings of ids only
            raise ValueError(
                "Decoder: embedding must not be adapted where it is the output matrix as well; "
                "take it out of the adapter's target modules, or use a decoder with tied=False"
            )
        return self.embedding(hidden, readout=True)

    def _expected(self) -> dict[str, Tensor]:
        """Tensors that `load` expects, by name: a new decoder's, or this one's if its class needs other arguments."""
        with torch.device("meta"):
            if type(self).__init__ is Decoder.__init__:
                return type(self)(self.config).state_dict()
            try:
                new = type(self)(self.config)
            except Exception:  # a subclass's constructor may raise anything for missing arguments
                new = None
        if new is None or new.config != self.config:
            new = self
        return {name.replace("_orig_mod.", ""): x for name, x in new.state_dict().items()}


def _as_path(op: str, folder: object) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"{op}: folder must be a str or a path, got {type(folder).__name__}")
    return Path(folder)


class TiedEmbedding(nn.Embedding):
    """Embedding whose matrix is also the output matrix.

    Both uses are calls of this module, so that hooks that gather, move, cast or adapt its weight apply to both.
    """

    def forward(self, x: Tensor, *, readout: bool = False) -> Tensor:
        """Embed token ids, [B, T] -> [B, T, D]; with `readout` map hidden states to logits, [B, T, D] -> [B, T, V]."""
        return F.linear(x, self.weight) if readout else super().forward(x)
