"""Processes that have torch and transformers from the start: importing them takes each seconds.

They are forked from one that imported both once and did nothing else, and are otherwise processes
of their own, in a session of their own, which may be killed.
"""

import multiprocessing
import os
import socket
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    "torch.distributed.nn.functional", "torch.distributed.fsdp",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
])  # fmt: skip


SCALEDOT = "import runpy; runpy.run_module('scaledot', run_name='__main__')"
"""The code of `python -m scaledot`."""


class Forked:
    """`python -c code *arguments` in this folder, with what `subprocess.Popen` has of it. What it
    prints must fit into a pipe, 64 kB, unless it is read meanwhile."""

    def __init__(self, code, *arguments, **environment):
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        (out, said), failed = FORKS.Pipe(duplex=False), Connection(os.dup(self._errors.fileno()))
        self._process = FORKS.Process(
            target=_begin,
            args=(code, arguments, os.getcwd(), os.environ | environment, sys.path, said, failed),
            daemon=True,
        )
        self._process.start()
        self.pid = self._process.pid
        self.stdout = os.fdopen(os.dup(out.fileno()), encoding="utf-8")
        for end in (out, said, failed):
            end.close()

    @property
    def returncode(self):
        return self._process.exitcode

    def send_signal(self, number):
        with suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, number)

    def terminate(self):
        self._process.terminate()

    def kill(self):
        self._process.kill()

    def communicate(self, timeout=240):
        """(the rest of stdout, stderr) once it has ended.

        Raises: AssertionError if it does not; it is killed then.
        """
        self._process.join(timeout)
        late = self.returncode is None
        self.kill()
        with self.stdout, self._errors:
            self._errors.seek(0)
            said = self.stdout.read(), self._errors.read()
        assert not late, said
        return said


def environments(count):
    """Of what torchrun tells each of so many processes of a machine, what torch needs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        {"RANK": str(i), "LOCAL_RANK": str(i), "WORLD_SIZE": str(count),
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} for i in range(count)
    ]  # fmt: skip


def ranks(code, count, *arguments):
    """`torchrun --nproc-per-node count` of the code; the first that fails ends the others.

    Raises: AssertionError with what they said.
    """
    started = [Forked(code, *arguments, **rank) for rank in environments(count)]
    until = time.monotonic() + 240
    while any(one.returncode is None for one in started):
        if any(one.returncode for one in started) or time.monotonic() > until:
            break
        time.sleep(0.05)
    failed = any(one.returncode != 0 for one in started)
    for one in started:
        one.kill()
    said = [one.communicate()[1] for one in started]
    assert not failed, "\n".join(said)


def _begin(code, arguments, folder, environment, path, out, errors):
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    sys.argv[:] = ["-c", *map(str, arguments)]
    for number, pipe in ((1, out), (2, errors)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    import torch

    torch.set_num_threads(1)
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
