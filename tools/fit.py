"""Launch configurations for GPUs that cannot be measured, chosen by the compiler's report on each kernel.

    python -m tools.fit                every architecture but the measured one
    python -m tools.fit sm_80 sm_89    some of them

A launch of tests/compile/aot.py is refitted if it needs too much shared memory or spills more than SPARE bytes. Then
runtime/configs/<architecture>.json gets a row for launches of its dtype, tiles and gate: the candidate near its row
that fits and spills least. The starting rows are the architecture's own. Without a file they are the measured card's,
without those of Gluon kernels, which are launched only where the dispatch table says so.
"""

import itertools
import json
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

from tests.compile import aot

from wyfold.runtime import kernel_configs
from wyfold.runtime.kernel_configs import Config, LaunchKey

MEASURED = "sm_90"
SPARE = 256
CONFIGS = aot.HERE.parents[1] / "src" / "wyfold" / "runtime" / "configs"


@dataclass(frozen=True)
class Lookup:
    """A launch and the key of its configuration lookup."""

    kernel: str
    key: str


class Cost(NamedTuple):
    """Resource cost of a launch, most important first: whether shared memory exceeds the limit, and bytes spilled."""

    over: bool
    spilled: int


def table_text(table: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A table with one row per line."""
    kernels = []
    for kernel, rows in table.items():
        lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
        body = f"{{{lines[0]}}}" if len(lines) == 1 else "{\n    " + ",\n    ".join(lines) + "\n  }"
        kernels.append(f"  {json.dumps(kernel)}: {body}")
    return "{\n" + ",\n".join(kernels) + "\n}\n"


def general(row: str) -> str:
    """The words of a key that determine resource use: dtype, tiles, chunk and gate."""
    key = LaunchKey.parse(row)
    tiles = {name: getattr(key, name) or key.tile(name) for name in ("BK", "BV")}
    return str(key._replace(K=None, V=None, form=None if key.form == "EF" else key.form, **tiles))


def candidates(config: Config) -> list[Config]:
    """A configuration and its variants: smaller tiles, other warp counts, fewer loads in flight, a register limit."""

    def sizes(name: str, size: int) -> tuple[int, ...]:
        return (size, size // 2) if name[0] == "B" and size > 16 else (size,)

    tiles = itertools.product(*(sizes(name, size) for name, size in config.blocks.items()))
    blocks = [dict(zip(config.blocks, found, strict=True)) for found in tiles]
    warps = [n for n in (config.warps, 2 * config.warps) if n <= 8]
    stages = sorted({config.stages, 1}, reverse=True)
    return [Config(w, s, b, limit) for b, w, s, limit in itertools.product(blocks, warps, stages, (None, 255))]


class Card:
    """One architecture and the configuration table that is made for it."""

    def __init__(self, architecture: str):
        self.architecture = architecture
        if (CONFIGS / f"{architecture}.json").exists():
            self.table = kernel_configs.overrides(architecture)
        else:
            rows = kernel_configs.overrides(MEASURED)
            self.table = {kernel: rows[kernel] for kernel in rows if not kernel.endswith(".gluon")}
            self.write()

    def write(self) -> None:
        (CONFIGS / f"{self.architecture}.json").write_text(table_text(self.table))
        for cached in (kernel_configs._table, kernel_configs.row):
            cached.cache_clear()

    def costs(self, call: aot.Call, only: str = "") -> dict[Lookup, Cost]:
        """Launch -> cost, for every kernel of a call or for one; the worst of several compilations."""
        lookups: list[Lookup] = []
        usual, found = kernel_configs.row, {}

        def row(where: str, kernel: str, key: LaunchKey) -> str:
            lookups.append(Lookup(kernel, str(key)))
            return usual(where, kernel, key)

        def compiled(kernel: Any, *arguments: Any, **options: Any) -> None:
            if not only or lookups[-1].kernel == only:
                usage = aot.compile_one(kernel, *arguments, **options)
                cost = Cost(usage.shared > aot.SHARED[self.architecture], usage.spilled)
                found[lookups[-1]] = max(cost, found.get(lookups[-1], cost))

        with mock.patch.object(kernel_configs, "row", row), aot.pretend_gpu(self.architecture, compiled):
            call.run()
        return found

    def improve(self, call: aot.Call, lookup: Lookup) -> None:
        """Add a row for launches like this one if a candidate is better than its current row."""
        name, kernel = general(lookup.key), lookup.kernel
        row = kernel_configs.row(self.architecture, kernel, LaunchKey.parse(lookup.key))
        tried = []
        for config in candidates(kernel_configs._table(self.architecture)[kernel][row]):
            with kernel_configs.override_row(self.architecture, kernel, name, config):
                tried.append((self.costs(call, kernel)[lookup], config))
        best, config = min(tried, key=lambda pair: pair[0])
        print(f"{self.architecture} {kernel} {name}: {tried[0][0]} -> {best} {config}", flush=True)
        if best < tried[0][0]:
            limit = {} if config.registers is None else {"registers": config.registers}
            fields = {**config.blocks, "warps": config.warps, "stages": config.stages, **limit}
            self.table.setdefault(kernel, {})[name] = fields
            self.write()


def main() -> None:
    for architecture in sys.argv[1:] or [name for name in aot.SHARED if name != MEASURED]:
        card = Card(architecture)
        for call in (*aot.CALLS, *aot.EXTENDED):
            for lookup, cost in card.costs(call).items():
                if cost > Cost(False, SPARE):
                    card.improve(call, lookup)


if __name__ == "__main__":
    main()
