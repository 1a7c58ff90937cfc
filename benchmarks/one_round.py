"""Counts what one round of A3C enters: files, functions and classes of polopt.

    python benchmarks/one_round.py                       # this checkout
    python benchmarks/one_round.py --checkout PATH       # another one

A round is one `step()` of AsyncGradients in the driver with one gradient of one remote worker: the
driver sends weights, the worker samples a fragment and computes a gradient, and the driver applies
it. The script profiles the driver's thread and the worker's main thread. It also counts all files
and lines of code (without comments, docstrings and blank lines) of each folder.

Somebody who reads polopt for the first time meets these files and names before one iteration is
clear. So the counts show how much a reader has to hold in the head.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import os
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: Its function `compute_gradient` runs in the workers.
STRATEGY = "polopt.optimizers.async_gradients"
ROOT = Path(__file__).resolve().parents[1]
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(path: Path) -> int:
    """Returns the number of lines of a Python file with code."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def folders(checkout: Path) -> dict[str, tuple[int, int]]:
    """Returns the number of files and of lines of code of each folder of the package."""
    counts = {}
    for link in sorted((checkout / "src" / "polopt").iterdir()):
        if link.is_dir() and link.name not in ("__pycache__", "tuned_examples"):
            files = list(link.resolve().rglob("*.py"))
            counts[link.name] = len(files), sum(map(code_lines, files))
    return counts


class Entered:
    """Collects the functions of polopt that this thread enters, as a profile function."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__", "")
            name = frame.f_code.co_qualname
            # A comprehension or lambda is part of the function around it.
            if module.startswith("polopt.") and "<" not in name.rsplit(".", 1)[-1]:
                self.functions.add((module, name))


def traced(worker: Any, weights: Any) -> Any:
    """In a worker: computes a gradient, as A3C does. The first call begins to profile this thread.
    So the second call also counts the functions around it, which receive calls and send answers."""
    if "entered" not in worker.state:
        worker.state["entered"] = Entered()
        sys.setprofile(worker.state["entered"])
    return importlib.import_module(STRATEGY).compute_gradient(worker, weights)


def entered(worker: Any, _: Any = None) -> Any:
    """In a worker: ends the profile, and returns the functions."""
    sys.setprofile(None)
    return worker.state["entered"].functions


def one_round() -> set[tuple[str, str]]:
    """Trains A3C with one worker, and returns the functions that a round enters."""
    import polopt

    strategy: Any = importlib.import_module(STRATEGY)
    options = {"num_workers": 1, "grads_per_step": 1, "min_sample_timesteps_per_iteration": 1}
    trainer = polopt.A3C({"env": "CartPole-v1", "rollout_fragment_length": 8, **options})
    plain = strategy.compute_gradient
    for _ in range(3):
        trainer.optimizer.step()
    found = Entered()
    strategy.compute_gradient = traced
    try:
        for _ in range(4):  # two calls may be in flight
            trainer.optimizer.step()
        sys.setprofile(found)
        trainer.optimizer.step()
        sys.setprofile(None)
    finally:
        strategy.compute_gradient = plain
    [of_worker] = polopt.foreach_worker(trainer.workers, entered).values()
    trainer.stop()
    return found.functions | of_worker


def classes(functions: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Returns the classes whose methods are among the functions."""
    return {(module, name.split(".")[0]) for module, name in functions if "." in name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--names", action="store_true", help="also print the files and classes")
    arguments = parser.parse_args()
    source = str(arguments.checkout.resolve() / "src")
    sys.path.insert(0, source)
    os.environ["PYTHONPATH"] = source
    for name, (files, lines) in folders(arguments.checkout).items():
        print(f"{name:14} {files:4} files {lines:6} lines of code")
    functions = {(module, name) for module, name in one_round() if module != "__main__"}
    files = {module for module, _ in functions}
    named = classes(functions)
    print(f"one round of A3C: {len(files)} files, {len(functions)} functions, {len(named)} classes")
    if arguments.names:
        print("\n".join(sorted(files)))
        print("\n".join(sorted(f"{module}.{name}" for module, name in named)))


if __name__ == "__main__":
    main()
