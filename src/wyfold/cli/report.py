"""Draw runs and stored results as one HTML page.

PATH is the folder of a run, a JSON file that a verb wrote, or a folder that is
searched for both. The default is `runs` and `docs/results`. The page contains
its data and the charting library (plotly). It opens without a network, and
forbids the browser to use one. Needs the extra `report`: `pip install ".[report]"` in a clone.
"""

from __future__ import annotations

import argparse
import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wyfold.cli import DONE, UsageError, printable, records, results, say
from wyfold.cli.train import rundir
from wyfold.cli.train.integrity import DamagedError
from wyfold.runtime import files

USUAL = (Path("runs"), Path("docs", "results"))

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 0 auto; padding: 1.5em; color: #222; }}
nav li {{ margin: 0.1em 0; }}
section {{ border-top: 1px solid #ccc; margin-top: 2em; padding-top: 0.5em; }}
p.from {{ color: #555; font-size: 0.9em; overflow-wrap: anywhere; }}
div.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.85em; }}
th, td {{ text-align: left; vertical-align: top; padding: 0.15em 0.8em 0.15em 0; border-bottom: 1px solid #eee; }}
summary {{ cursor: pointer; color: #346; }}
</style>
<script>{library}</script>
</head>
<body>
<h1>{title}</h1>
<nav><ol>{contents}</ol></nav>
{sections}
</body>
</html>
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `wyfold report`."""
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="run, JSON file, or a folder of them (default: runs, docs/results)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="file to write (default: %(default)s)",
    )
    parser.add_argument("--title", default="Wyfold: runs and results", help='title (default: "%(default)s")')


def run(args: argparse.Namespace) -> int:
    """Write the page. Returns 0."""
    for path in args.paths:
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder")
    if args.out.is_dir():
        raise UsageError(f"--out: cannot write {args.out}: it is a folder, and the page is one file")
    results.ready(args.out.parent)
    found = dict(_found(args.paths or [path for path in USUAL if path.is_dir()]))
    if not found:
        raise UsageError("nothing to report: no finished part of a run and no result in what was given")

    from plotly.io import to_html
    from plotly.offline import get_plotlyjs

    from wyfold.cli import figures

    sections, contents = [], []
    for number, (name, (kind, record)) in enumerate(found.items()):
        parts = [f'<section id="s{number}"><h2>{html.escape(printable(name))}</h2>', _origin(record)]
        for part in figures.DRAWN[kind](record):
            drawn = isinstance(part, figures.go.Figure)
            responsive = {"responsive": True, "displaylogo": False}
            parts.append(to_html(part, include_plotlyjs=False, full_html=False, config=responsive) if drawn else part)
        sections.append("\n".join([*parts, "</section>"]))
        contents.append(f'<li><a href="#s{number}">{html.escape(printable(name))}</a></li>')
    page = PAGE.format(
        title=html.escape(args.title),
        # The library's own `</script` would close the element.
        library=get_plotlyjs().replace("</script", "<\\/script"),
        contents="\n".join(contents),
        sections="\n".join(sections),
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # JSON and the --title option may contain unpaired surrogates.
    files.write(args.out, page.encode("utf-8", "backslashreplace").decode("utf-8"))
    say(f"{args.out}: {len(found)} {'section' if len(found) == 1 else 'sections'}, {len(page) / 2**20:.1f} MiB")
    return DONE


def _found(paths: Sequence[Path]) -> Iterator[tuple[str, records.Stored]]:
    """Yield name and record of every run and result, in the order of paths and names."""
    for path in paths:
        if path.is_file():
            yield str(path), records.read_any(path)
            continue
        folders = sorted({file.parent for name in (rundir.HISTORY, rundir.MARK) for file in path.rglob(name)})
        for folder in folders:
            record = _run(folder)
            if record is not None:
                yield str(folder), record
        for file in sorted(path.rglob("*.json")):
            # Files in a run's folder belong to the run.
            if file.is_file() and not any(folder in file.parents for folder in folders):
                yield str(file), records.read_any(file)


def _run(folder: Path) -> records.Stored | None:
    try:
        return records.read_run(folder)
    except DamagedError as damage:
        if damage.file.parent == folder:
            raise damage.advice("", "remove the file to draw what the run's newest checkpoint has") from damage
        rename = f"rename {damage.folder}, so that it no longer ends in a number, to draw what is left"
        raise damage.advice(rename, "leave this run out") from damage


def _origin(record: dict[str, Any]) -> str:
    """HTML line with machine, date and command of a record, as far as the record has them."""
    hardware = record.get("hardware") or {}
    hardware = hardware if isinstance(hardware, dict) else {"gpus": hardware}
    machine = hardware.get("gpus") or record.get("gpu") or hardware.get("processor")
    versions = record.get("versions") or {}
    tools = [
        f"{tool} {versions[tool]}" for tool in ("torch", "triton") if isinstance(versions, dict) and tool in versions
    ]
    modified = " with changes" if record.get("modified") else ""
    commit = f"commit {record['commit']}{modified}" if record.get("commit") else ""
    parts = [record.get("date"), _machine(machine), *tools, commit]
    line = html.escape(", ".join(str(word) for word in parts if word))
    command = f"<br><code>{html.escape(record['command'])}</code>" if record.get("command") else ""
    return f'<p class="from">{line}{command}</p>'


def _machine(machine: Any) -> str:
    if isinstance(machine, list):
        return ", ".join(_machine(one) for one in machine)
    return str(machine.get("name", "")) if isinstance(machine, dict) else str(machine or "")
