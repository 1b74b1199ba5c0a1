"""Patterns of layers, "gdn*3 attention": names of mixers, each with an optional count. Imports no torch."""

from __future__ import annotations

MIXERS = ("delta_net", "gated_delta_net", "kda", "ttt_linear", "attention")
ALIASES = {"gdn": "gated_delta_net"}

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


def canonical(field: str, name: str) -> str:
    """Canonical name of a mixer that may be given by an alias.

    Raises:
        ValueError: there is no such mixer; the message names the field.
    """
    name = ALIASES.get(name, name)
    if name not in MIXERS:
        raise ValueError(f"DecoderConfig: {field} must name {', '.join((*MIXERS, *ALIASES))}, got {name[:80]!r}")
    return name
