"""Warp stalls of a kernel, from an ncu profile: `python tools/kernels/stalls.py SOURCE.csv`.

    ncu --section SourceCounters --section WarpStateStats -k regex:wyfold_prepare -c 1 -o profile python CALL.py
    ncu -i profile.ncu-rep --page source --csv > SOURCE.csv

Prints for every kernel in the file: samples by stall reason; samples by kind of instruction, with the executions per
warp; and samples by stretch of code, which its most frequent instructions identify.
"""

import csv
import re
import sys
from collections import Counter

STRETCH = 150
"""Instructions per line of the last table."""


def main(path: str) -> None:
    name, head, rows = "", [], []
    with open(path, newline="") as file:
        for line in csv.reader(file):
            if line[:1] == ["Kernel Name"]:
                show(name, head, rows)
                name, rows = line[1], []
            elif line[:1] == ["Address"]:
                head = line  # columns differ between kernels
            elif line:
                rows.append(line)
    show(name, head, rows)


def show(name: str, head: list[str], rows: list[list[str]]) -> None:
    if not rows:
        return
    column = {title: i for i, title in enumerate(head)}
    reasons = [title for title in head if title.startswith("stall_") and "(" not in title]

    def number(row: list[str], title: str) -> float:
        return float(row[column[title]] or 0)

    def word(row: list[str]) -> str:
        return re.sub(r"^@!?U?P\w+ ", "", row[column["Source"]].strip()).split()[0].split(".")[0]

    samples = sum(number(row, "# Samples") for row in rows)
    warps = max(number(row, "Instructions Executed") for row in rows[:20])
    waits, kinds, runs = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        kinds[word(row)] += number(row, "# Samples")
        runs[word(row)] += number(row, "Instructions Executed") / warps
        for reason in reasons:
            waits[reason.removeprefix("stall_")] += number(row, reason)
    print(f"{name}: {len(rows)} instructions, {sum(runs.values()):.0f} a warp, {samples:.0f} samples")
    print("  ", ", ".join(f"{reason} {n / samples:.0%}" for reason, n in waits.most_common(9)))
    print("  ", ", ".join(f"{kind} {n / samples:.1%} of {runs[kind]:.0f}" for kind, n in kinds.most_common(20)))
    for begin in range(0, len(rows), STRETCH):
        part = rows[begin : begin + STRETCH]
        here = Counter({reason: sum(number(row, reason) for row in part) for reason in reasons})
        share = sum(number(row, "# Samples") for row in part) / samples
        words = " ".join(f"{n} {kind}" for kind, n in Counter(map(word, part)).most_common(5))
        why = ", ".join(f"{reason.removeprefix('stall_')} {n / samples:.1%}" for reason, n in here.most_common(3))
        print(f"{begin:6} {share:6.1%}  {words}  ({why})")


if __name__ == "__main__":
    main(sys.argv[1])
