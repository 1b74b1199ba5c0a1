"""Plant every mutant in turn, and print the test that kills it.

    python -m tests.mutants             all of them; first the killers without a fault, which must pass
    python -m tests.mutants WORD...     those whose fault, file or killer has one of the words

The exit status is 1 if a mutant survives, if its text is no longer in the source, or if a killer fails without it.
"""

import sys
import tempfile
from pathlib import Path

from tests.mutants.planting import Copy
from tests.mutants.vector import MUTANTS


def main(words: list[str]) -> int:
    chosen = [x for x in MUTANTS if not words or any(word in f"{x.fault} {x.file} {x.killer}" for word in words)]
    stale = []
    for mutant in chosen:
        try:
            mutant.planted()
        except (ValueError, SyntaxError) as error:
            stale.append(mutant)
            print(f"stale     {error}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        broken = list(copy.broken(chosen))
        for output in broken:
            print(f"a killer fails without a mutant\n{output}")
        survivors = 0
        for mutant in chosen:
            if mutant in stale:
                continue
            found = copy.outcome(mutant)
            survivors += not found.killed
            begin = f"{'killed' if found.killed else 'SURVIVES':<9} {found.seconds:5.1f} s"
            print(f"{begin}  {mutant.file}: {mutant.fault}\n{'':19}{found.message}", flush=True)
    print(f"{len(chosen)} mutants, {survivors} survive, {len(stale)} have no text in the source")
    return int(bool(survivors or stale or broken or not chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
