"""Patterns of layers, "gdn*3 attention": names of mixers, each with an optional count. Imports no torch."""

from __future__ import annotations

import itertools

MIXERS = (
    "delta_net",
    "gated_delta_net",
    "kda",
    "gated_delta_net2",
    "gated_delta_product",
    "gla",
    "rwkv7",
    "ttt_linear",
    "path_attention",
    "attention",
)
ALIASES = {"gdn": "gated_delta_net", "gdn2": "gated_delta_net2", "gdp": "gated_delta_product"}
_SHORT = {name: alias for alias, name in ALIASES.items()}

MOST_LAYERS = 2**16
"""Limit on the layers of a model, and of one period of its pattern. Far above any model, and still quick to parse."""


def parse(pattern: object) -> tuple[str, ...]:
    """One period of a pattern: canonical names, in order.

    Raises:
        TypeError: the pattern is no str.
        ValueError: no mixer, an unknown mixer, an invalid count, or more than `MOST_LAYERS` layers.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"DecoderConfig: pattern must be a str, got {type(pattern).__name__}")
    period: list[str] = []
    for entry in pattern.split():
        name, star, count = entry.partition("*")
        if star and not (count.isdecimal() and count.strip("0")):
            raise ValueError(f"DecoderConfig: pattern must have a count of at least 1 after a *, got {entry[:80]!r}")
        # Longer counts are not converted: Python limits the digits, and memory the layers.
        repeats = 1 if not star else int(count) if len(count) < 10 else MOST_LAYERS + 1
        if len(period) + repeats > MOST_LAYERS:
            raise ValueError(f"DecoderConfig: pattern must have at most {MOST_LAYERS} layers, got {entry[:80]!r} in it")
        period += [canonical("pattern", name)] * repeats
    if not period:
        raise ValueError(f"DecoderConfig: pattern must name at least one mixer, got {pattern[:80]!r}")
    return tuple(period)


def describe(pattern: str, depth: int) -> str:
    """The layers that are built, as text, with the mixers of the pattern that the depth leaves out.

    Example:
        >>> describe("gdn*3 attention", 8)
        '8 layers: 2 x (gdn*3, attention)'
        >>> describe("gdn*3 attention", 2)
        '2 layers: gdn*2 (the pattern has 4 layers, a depth of 2 uses the first 2: no attention)'
    """
    period = parse(pattern)
    missing = [_SHORT.get(name, name) for name in dict.fromkeys(period) if name not in period[:depth]]
    used = "the first" if depth == 1 else f"the first {depth}"
    cut = f" (the pattern has {len(period)} layers, a depth of {depth} uses {used}: no {', no '.join(missing)})"
    return f"{depth} {'layer' if depth == 1 else 'layers'}: {built(pattern, depth)}{cut if missing else ''}"


def built(pattern: str, depth: int) -> str:
    """The layers that are built, as a list. The work does not grow with the depth, which may come from a file.

    Example:
        >>> built("gdn*3 attention", 6)
        'gdn*3, attention, gdn*2'
    """
    period = parse(pattern)
    whole, rest = divmod(depth, len(period))
    if len(set(period)) == 1:
        return _counted([(period[0], depth)])
    if whole > 1:
        return ", ".join([f"{whole} x ({_listed(period)})", *([_listed(period[:rest])] if rest else [])])
    return _listed((period * 2)[:depth])


def _listed(names: tuple[str, ...]) -> str:
    return _counted([(name, len(list(run))) for name, run in itertools.groupby(names)])


def _counted(runs: list[tuple[str, int]]) -> str:
    """Mixers with the number of their repetitions, as in a pattern, and commas."""
    return ", ".join(f"{_SHORT.get(name, name)}{f'*{count}' if count > 1 else ''}" for name, count in runs)


def canonical(field: str, name: str) -> str:
    """Canonical name of a mixer that may be given by an alias.

    Raises:
        ValueError: there is no such mixer; the message names the field.
    """
    name = ALIASES.get(name, name)
    if name not in MIXERS:
        raise ValueError(f"DecoderConfig: {field} must name {', '.join((*MIXERS, *ALIASES))}, got {name[:80]!r}")
    return name
