"""Runs one measurement in its own process and reads the JSON in its last line of output."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from environments import PeerError, last_line

#: Time limit for start-up (Ray, imports, a first update), which is not part of a measurement.
STARTUP_LIMIT_S = 300.0
GRACE_S = 10.0
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def run(command: list[str], limit_s: float, python_path: Path | None = None) -> dict[str, Any]:
    """Runs a script and returns the JSON object in its last line of output.

    The script runs in an empty folder with one thread per process. Afterwards, this function ends
    the process group of the script.

    Args:
        command: the script and its arguments.
        limit_s: time limit for the whole process.
        python_path: PYTHONPATH of the process. None removes the variable, so a peer does not
            import packages of this environment.

    Raises:
        PeerError: the script failed, did not end in time, or did not print JSON.
    """
    environ = environment(python_path)
    # Files instead of pipes, because a process that outlives the script would keep a pipe open.
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        process = subprocess.Popen(
            command, stdout=out, stderr=err, cwd=folder, env=environ, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise PeerError(f"did not end within {limit_s:.0f} s") from None
        finally:
            end_group(process)
        out.seek(0)
        err.seek(0)
        output, errors = out.read(), err.read()
    if code != 0:
        raise PeerError(f"exit status {code}: {last_line(errors or output)}")
    try:
        result: dict[str, Any] = json.loads(last_line(output))
    except ValueError:
        raise PeerError(f"the last line is not JSON: {last_line(output)}") from None
    return result


def environment(python_path: Path | None) -> dict[str, str]:
    """Returns the environment variables of a script's process: for one thread, and PYTHONPATH."""
    environ = {**os.environ, **dict.fromkeys(THREADS, "1")}
    environ.pop("PYTHONPATH", None)
    if python_path is not None:
        environ["PYTHONPATH"] = str(python_path.resolve())
    return environ


class Turns:
    """A context manager with a running script of `peers/` that measures on request.

    The script runs in an empty folder with one thread per process, as in `run`.

    Args:
        command: the script, its arguments, and `--turns`.
        limit_s: time limit for start-up and for each measurement.
        python_path: PYTHONPATH of the process.
    """

    def __init__(self, command: list[str], limit_s: float, python_path: Path) -> None:
        self._limit_s = limit_s
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name) / "stderr"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self._folder.name,
                env=environment(python_path),
                start_new_session=True,
            )

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        end_group(self._process)
        self._folder.cleanup()

    def result(self) -> dict[str, Any]:
        """Waits for the measurement in progress and returns it.

        Raises:
            PeerError: the script has ended, or takes too long.
        """
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], self._limit_s)[0]:
            raise PeerError(f"did not measure within {self._limit_s:.0f} s")
        line = output.readline()
        if not line:
            status = self._process.wait(GRACE_S)
            problem = last_line(self._errors.read_text())
            raise PeerError(f"exit status {status}: {problem}")
        measured: dict[str, Any] = json.loads(line)
        return measured

    def measure(self) -> dict[str, Any]:
        """Starts the next measurement and returns its result. Raises errors as `result` does."""
        given = self._process.stdin
        assert given is not None
        with contextlib.suppress(BrokenPipeError):  # `result` reports why the script has ended
            given.write(b"\n")
            given.flush()
        return self.result()


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process group with SIGTERM, so that Ray can clean up, and then with SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(GRACE_S)
