"""Kills processes by SIGKILL while they save checkpoints, 100 times."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_helpers import kill_while_saving

pytestmark = pytest.mark.timeout(1200)


def test_fallback_after_100_kills(tmp_path: Path) -> None:
    cut_off = kill_while_saving(tmp_path, kills=100)
    print(f"\nSIGKILL during save: 100 of 100 restored; {cut_off} saves were cut off")
    assert cut_off > 20
