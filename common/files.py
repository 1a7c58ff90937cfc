"""Files and names of other users: checkpoints and results that are not trusted."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path, most_bytes: int) -> BufferedReader:
    """Opens a regular file, or a link to one, for reading. Other kinds of files are not opened,
    because a FIFO would block, and a device may never end.

    Args:
        path: of the file.
        most_bytes: largest size that is accepted.

    Raises:
        OSError: missing, not a regular file, larger than `most_bytes`, or not readable.
    """
    _check(path, path.stat(), most_bytes)
    # Another file may take its place now. O_NONBLOCK opens a FIFO without waiting for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check(path, os.fstat(descriptor), most_bytes)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Reads a regular file of at most `most_bytes` bytes. What is appended meanwhile is left out.
    So is all of a file without a size, such as those in `/proc`.

    Raises:
        OSError: as `open_regular`.
    """
    with open_regular(path, most_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def printable(text: str) -> str:
    """`text` with backslash escapes for all characters that a terminal may interpret or cannot
    show: control characters, escape sequences, line breaks, marks that reverse the direction of
    text, and bytes of file names that are not UTF-8."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _check(path: Path, status: os.stat_result, most_bytes: int) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if status.st_size > most_bytes:
        reason = f"{status.st_size:,} bytes, more than the {most_bytes:,} that are read"
        raise OSError(errno.EFBIG, reason, str(path))
