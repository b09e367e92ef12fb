"""Several processes of one run, on ``jax.distributed``, that end together.

XLA's collectives wait for a process that is gone, on some networks for ever. So every process keeps
a TCP connection to process 0 that carries one byte every few seconds and nothing else. A killed
process closes its connection and a lost machine falls silent: whoever sees it says so in one line
and ends, which closes its own connections, and so on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from typing import Any, NoReturn

import jax
import jaxlib
import jaxlib.version
import numpy as np

from jax_flashtrain.train.errors import UserError

#: Seconds between two signs of life, of silence after which a process counts as gone, and in which
#: all have to come.
BEAT, SILENCE, COMING = 5.0, 60.0, 90.0
#: With jaxlib 0.8 about every second start fails (two sums side by side mix up or time out); the
#: next release this was tested with.
CPU_COLLECTIVES = (0, 10)
_BEAT, _END = b".", b"q"
#: Exit code of a process whose run ended because of another.
EXIT_LOST = 3

_environment = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def is_first() -> bool:
    """Whether this process writes the files and speaks for the run."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def any_process(flag: bool) -> bool:
    """Whether the flag is set in some process (every process calls it)."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def settings(given: dict[str, Any]) -> tuple[str, int, int] | None:
    """(coordinator, processes, process) from the options or JAX's environment variables."""
    options = [given.pop(name, None) for name in ("coordinator", "processes", "process")]
    found = [
        os.environ.get(variable) if option is None else option
        for option, variable in zip(options, _environment, strict=True)
    ]
    if all(x is None for x in found):
        return None
    if any(x is None for x in found):
        raise UserError(
            "--coordinator HOST:PORT, --processes N and --process I (or "
            f"{', '.join(_environment)}) belong together"
        )
    address, count, index = found
    try:
        count, index = int(count), int(index)
        host, port = str(address).rsplit(":", 1)
        if not (0 <= index < count and host and 0 < int(port) < 65536):
            raise ValueError
    except ValueError:
        raise UserError(
            "--coordinator must be HOST:PORT and --process at least 0 and below --processes, got "
            f"{address}, {index} and {count}"
        ) from None
    return (str(address), count, index) if count > 1 else None


class Group:
    """The processes of a run; ``close`` ends this one's part in order."""

    def __init__(self, address: str, count: int, index: int):
        self.count, self.index = count, index
        self._ended = False
        self._lock = threading.Lock()
        host, port = address.rsplit(":", 1)
        if index == 0:
            try:
                socket.create_server(("", int(port))).close()  # jaxlib crashes where it is taken
            except OSError as e:
                raise UserError(f"--coordinator {address}: {e.strerror}") from None
        # jax's own timeout ends the process with a stack trace: ours comes before it.
        reason = f"--coordinator {address}: not all {count} processes were there after {COMING:g} s"
        alarm = threading.Timer(COMING, self.lost, [reason])
        alarm.daemon = True
        alarm.start()
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(
                address, num_processes=count, process_id=index,
                initialization_timeout=int(2 * COMING),
            )  # fmt: skip
        except Exception as e:  # jaxlib's own kinds: nobody answers, wrong count, a busy port
            lines = str(e).strip().splitlines() or [type(e).__name__]
            alarm.cancel()
            raise UserError(f"--coordinator {address}: {lines[0][:200]}") from None
        if jax.default_backend() == "cpu" and jaxlib.version.__version_info__ < CPU_COLLECTIVES:
            alarm.cancel()
            needed = ".".join(map(str, CPU_COLLECTIVES))
            raise UserError(
                f"several processes on CPUs need jaxlib {needed} or newer, got {jaxlib.__version__}"
            )
        try:
            self._connections = self._connect(host.strip("[]"))
        except OSError as e:
            self.lost(f"--coordinator {address}: no connection between the processes: {e}")
        alarm.cancel()
        for peer, connection in self._connections.items():
            threading.Thread(target=self._watch, args=(peer, connection), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def _connect(self, host: str) -> dict[int, socket.socket]:
        """Process 0's connections to all, or the one to process 0."""
        from jax.experimental import multihost_utils

        if self.index:
            port = int(multihost_utils.broadcast_one_to_all(np.int32(0)))
            connection = socket.create_connection((host, port), timeout=SILENCE)
            connection.sendall(self.index.to_bytes(4, "big"))
            return {0: connection}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server(("", 0), family=family, backlog=self.count) as server:
            server.settimeout(SILENCE)
            multihost_utils.broadcast_one_to_all(np.int32(server.getsockname()[1]))
            found: dict[int, socket.socket] = {}
            while len(found) < self.count - 1:
                connection, _ = server.accept()
                connection.settimeout(SILENCE)
                peer = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
                if 0 < peer < self.count and peer not in found:
                    found[peer] = connection
                else:  # a stranger
                    connection.close()
        return found

    def _watch(self, peer: int, connection: socket.socket) -> None:
        connection.settimeout(SILENCE)
        while True:
            try:
                got = connection.recv(64)
            except OSError:
                got = b""
            if _END in got:
                return
            if not got:
                self.lost(
                    f"process {peer} is gone: process {self.index} of {self.count} ends too; go on "
                    "from the last checkpoint with --resume"
                )

    def _beat(self) -> None:
        while not self._ended:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):  # the thread that reads will notice
                    connection.sendall(_BEAT)
            time.sleep(BEAT)

    def lost(self, reason: str) -> NoReturn:
        """One line, and the end of this process at once: its threads may hang in a collective."""
        with self._lock:  # held for good: one line
            if self._ended:
                threading.Event().wait()
            print(f"error: {reason}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(EXIT_LOST)

    def close(self) -> None:
        """The work is done: waits for the others, which then do without this process."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(_END)
        jax.distributed.shutdown()
        self._ended = True

    def abandon(self, code: int) -> NoReturn:
        """Ends this process without the others, which notice."""
        self._ended = True
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
