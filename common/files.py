"""Reads files that are not trusted, such as checkpoints and results of other users."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path, most_bytes: int) -> BufferedReader:
    """Opens a regular file, or a link to a regular file, for reading. Other kinds of files are
    refused, because opening a FIFO would block, and reading a device may never end.

    Args:
        path: the path of the file.
        most_bytes: the maximum size of the file in bytes.

    Raises:
        OSError: if the file is missing, is not a regular file, is larger than `most_bytes`, or
            cannot be read.
    """
    _check(path, path.stat(), most_bytes)
    # Another file may have replaced this file after the check, so the opened file is checked again.
    # If the new file is a FIFO, O_NONBLOCK opens it without waiting for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check(path, os.fstat(descriptor), most_bytes)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Reads a regular file of at most `most_bytes` bytes. Bytes that are appended during the read
    are not included. For files whose size is reported as 0, such as files in `/proc`, the result is
    empty.

    Raises:
        OSError: see `open_regular`.
    """
    with open_regular(path, most_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def printable(text: str) -> str:
    """Returns `text` with backslash escapes for all characters that a terminal may interpret or
    cannot show. Examples are control characters, escape sequences, line breaks, marks that reverse
    the direction of text, and bytes of file names that are not UTF-8."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _check(path: Path, status: os.stat_result, most_bytes: int) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if status.st_size > most_bytes:
        reason = f"{status.st_size:,} bytes, which exceeds the limit of {most_bytes:,} bytes"
        raise OSError(errno.EFBIG, reason, str(path))
