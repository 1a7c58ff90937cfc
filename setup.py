"""The configuration is in setup.cfg. This file changes only editable installs."""

import sys
from pathlib import Path
from typing import Any

from setuptools import setup

changed: dict[str, Any] = {}
# By the `package_dir` of setup.cfg, setuptools would install an import hook, which editors and type
# checkers cannot follow. The links in src/polopt show all packages below src, so a path file with
# src is enough. Git makes no links on a system without symbolic links.
if "editable_wheel" in sys.argv and Path("src/polopt/common").is_dir():
    changed = {"package_dir": {"": "src"}, "options": {"egg_info": {"egg_base": "."}}}

setup(**changed)
