"""Python programs that start with PyTorch imported: forks of a server process, one per test process.

    python -m tests.processes MODULE...

imports the modules and then forks a child for every request on its standard input. A child runs a program as the
interpreter's command line would, with its own arguments, environment, folder and output. Importing PyTorch takes 1.3 s
of a core, and its compiler 1.2 s more, which some seventy test programs need; building a decoder or asking for
deterministic algorithms imports the compiler. A program whose subject is an import itself is started by `subprocess`
instead.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300
COMPILER = "torch._inductor"
"""PyTorch's compiler, with its tracer and Triton. Triton reads at this import whether it interprets kernels."""


class Program:
    """A running child of a server.

    Attributes:
        pid: Its process.
    """

    def __init__(self, server: "Server", command: Sequence[str], env: Mapping[str, str] | None, cwd: Path | None):
        self.server, self.command = server, list(map(str, command))
        self.output = [tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")]
        self.pid = server.ask(
            "start",
            {
                "command": self.command,
                "env": {**os.environ} if env is None else dict(env),
                "cwd": str(cwd or Path.cwd()),
                "output": [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self.output],
            },
        )

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Its exit status and output, once it has ended. After five minutes it is killed."""
        killer = threading.Timer(TIMEOUT_S, os.kill, (self.pid, signal.SIGKILL))
        killer.start()
        status = self.server.ask("wait", self.pid)
        killer.cancel()
        return subprocess.CompletedProcess(self.command, status, *map(content, self.output))


def content(file: IO[str]) -> str:
    with file:
        file.seek(0)
        return file.read()


class Server:
    """A process that has imported modules, and forks programs.

    Args:
        modules: Names of the modules.
    """

    def __init__(self, *modules: str):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.processes", *modules],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def close(self) -> None:
        self.process.communicate()

    def ask(self, what: str, about: object) -> int:
        """The answer to a request: a process number or an exit status."""
        print(json.dumps([what, about]), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def start(
        self, command: Sequence[object], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Program:
        """Start a program: `["-c", code, ...]`, `["-m", module, ...]` or `[script, ...]`."""
        return Program(self, command, env, cwd)

    def run(
        self, command: Sequence[object], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        return self.start(command, env=env, cwd=cwd).wait()


@functools.cache
def fresh() -> Server:
    """Programs that have imported PyTorch, and nothing of this package."""
    return Server("torch")


@functools.cache
def with_package() -> Server:
    """Programs that have imported this package, and the parts of PyTorch that runs over several ranks use."""
    return Server(
        COMPILER,
        "tests.conftest",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "wyfold.cli.train.trainer",
        "wyfold.models",
    )


def run_ranks(command: Sequence[object], world: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """Run a program on every rank with the environment that torchrun gives it, until all have ended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    shared |= {"TORCHELASTIC_RUN_ID": "tests", "CUDA_VISIBLE_DEVICES": ""}
    programs = [
        with_package().start(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    return [program.wait() for program in programs]


# --- the server process ----------------------------------------------------------------------------------------------


def serve(modules: Sequence[str]) -> None:
    """Answer requests until the test process ends. A child returns as well, once its program has."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector of a child must not visit shared objects, which would copy their pages
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's, which reaches the whole group
    for line in requests:
        what, about = json.loads(line)
        if what == "start":
            answer = os.fork()
            if answer == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                return become(**about)
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(about, 0)[1])
        print(answer, file=answers, flush=True)


def become(command: list[str], env: dict[str, str], cwd: str, output: list[str]) -> None:
    """Run the program of a command line in this process."""
    for number, path in enumerate(output, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if command[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *command[2:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(command[1], "<string>", "exec"), main.__dict__)
    elif command[0] == "-m":
        sys.argv, sys.path[0] = command[1:], cwd
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1:])
