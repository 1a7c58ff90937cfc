"""Compares polopt with other libraries, in turns on the same cores.

    make bench                                    # all cases but the longest. An hour
    make bench ARGS='--only learn-sac --seeds 3'  # the longest. An hour
    make bench ARGS='--only ppo --repeats 1'      # one comparison. Minutes
    make bench ARGS='--markdown docs/benchmarks.md'

Each measurement is a process (`peers/<peer>/run.py`). polopt and each peer are measured in turns
(A B A B). All processes run on the same two cores with one thread per process. Each peer has its
own virtual environment, which the first run makes. If a peer has several settings in a comparison,
all of them run in the first turn, and later turns run only the fastest. If a peer cannot be
installed, fails, or does not end, its row has the reason, and the other rows are still measured.
`benchmarks/results/suite.jsonl` holds the result of each turn, a line for each case. A case that is
measured again replaces its line. With `--resume`, only the turns that it lacks are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from about import about
from environments import CACHE, PEERS, PeerError, make_environment
from processes import STARTUP_LIMIT_S, run
from stored_runs import read_runs, write_runs
from suite_cases import CASES, Case, Opponent
from verdicts import Row, floor_row, learn_rows, markdown, rate_row

ROOT = Path(__file__).resolve().parents[1]
STORE = ROOT / "benchmarks/results/suite.jsonl"
PAGE = ROOT / "docs/benchmarks.md"
#: Marks around the table in a page.
BEGIN, END = "<!-- make bench: begin -->", "<!-- make bench: end -->"


@dataclass
class Side:
    """One system with one setting, and its results by turn."""

    peer: str
    case: str
    turns: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: str = ""


class Runner:
    """Makes environments and runs scripts in them.

    Args:
        args: parsed command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._pythons: dict[str, Path | PeerError] = {}

    def turn(self, side: Side, turn: int, case: Case) -> None:
        """Runs one process and stores its result, or the error, in `side`."""
        if side.error or turn in side.turns:
            return
        args, seconds = self._args, self._args.seconds
        if case.kind == "learn":
            seconds = case.limit_s or args.learning_seconds
        try:
            command = [str(self._python(side.peer)), str(PEERS / side.peer / "run.py"), side.case]
            command += ["--seconds", str(seconds), "--seed", str(turn)]
            path = ROOT / "src" if side.peer == "polopt" else None
            side.turns[turn] = run(command, 2 * seconds + STARTUP_LIMIT_S, path)
        except PeerError as error:
            side.error = str(error)
        result = side.error or json.dumps(side.turns[turn])
        print(f"{side.peer} {side.case}, turn {turn + 1}: {result}", file=sys.stderr, flush=True)

    def _python(self, peer: str) -> Path:
        if peer == "polopt":
            return Path(sys.executable)
        if peer not in self._pythons:
            python = self._args.python37 if peer == "rllib085" else sys.executable
            try:
                self._pythons[peer] = make_environment(peer, self._args.env, python)
            except PeerError as error:
                self._pythons[peer] = error  # so other cases do not try again
        made = self._pythons[peer]
        if isinstance(made, PeerError):
            raise PeerError(f"not installed: {made}")
        return made


def measure(
    case: Case, turns: int, runner: Runner, stored: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Measures one case. Returns polopt's side and then the fastest side of each opponent, as they
    are stored. Turns of the sides in `stored` are not measured again, unless they failed."""
    known = [replace(side, error="") for side in map(side_of, stored)]

    def sides_of(peer: str, names: Sequence[str]) -> list[Side]:
        fastest = [side for side in known if side.peer == peer and side.case in names]
        return fastest or [Side(peer, name) for name in names]

    (ours,) = sides_of("polopt", [case.ours])
    against = [(opponent, sides_of(opponent.peer, opponent.cases)) for opponent in case.opponents]
    for turn in range(turns):
        runner.turn(ours, turn, case)
        for _, sides in against:
            for one in sides:
                runner.turn(one, turn, case)
            sides[:] = [best_of(sides)]
    return [asdict(ours), *(asdict(best) for _, (best,) in against)]


def side_of(stored: Mapping[str, Any]) -> Side:
    """Returns a side from its stored form."""
    turns = {int(turn): result for turn, result in stored["turns"].items()}
    return Side(stored["peer"], stored["case"], turns, stored["error"])


def rows_of(case: Case, sides: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Returns the rows of a measured case for each opponent. If polopt's own rate has a goal, the
    first row compares this rate with the goal."""
    ours, *theirs = map(side_of, sides)
    rows = [floor_row(case, ours.turns)] if case.floor is not None else []
    for opponent, side in zip(case.opponents, theirs, strict=True):
        rows += compare(case, opponent, ours, side)
    return rows


def page(store: Mapping[str, Any], text: str) -> str:
    """Returns the text of a page whose table has the rows of the stored cases in place of their
    former rows, and below the table the commit of each stored case.

    Raises:
        ValueError: the page does not have the marks.
    """
    before, begin, rest = text.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END} for the table")
    raw = "Raw results of each turn are in"
    lines = [line for line in table.splitlines() if not line.startswith(raw)]
    named: dict[str, list[str]] = {}
    for case in CASES:
        if case.name not in store:
            continue
        rows = rows_of(case, store[case.name]["sides"])
        own = tuple(f"| {row.what} |" for row in rows)
        places = [n for n, line in enumerate(lines) if line.startswith(own)]
        last = max(n for n, line in enumerate(lines) if line.startswith("|"))
        place = min(places, default=last + 1)
        lines = [line for line in lines if not line.startswith(own)]
        lines[place:place] = markdown(rows).splitlines()[2:]
        named.setdefault(store[case.name]["commit"], []).append(f"`{case.name}`")
    if named:
        while not lines[-1]:
            lines.pop()
        cases = "; ".join(f"{', '.join(names)} (commit {at})" for at, names in named.items())
        where = f"{raw} `benchmarks/results/suite.jsonl`, with the command, for {cases}."
        lines += ["", where, ""]
    return f"{before}{begin}{''.join(f'{line}{chr(10)}' for line in lines)}{end}{after}"


def is_chosen(case: Case, names: Sequence[str] | None) -> bool:
    """Whether a case runs, where `names` are the names of `--only`."""
    if names is None:
        return case.limit_s is None
    return any(fnmatch(case.name, name) for name in names)


def best_of(sides: Sequence[Side]) -> Side:
    """Returns the fastest side. Prefers sides that did not fail and that reached the goal."""

    def speed(turn: dict[str, Any]) -> tuple[bool, float]:
        if "rate" in turn:
            return True, turn["rate"]
        return turn["reached"], -turn["seconds_to_goal"]

    failed = (False, float("-inf"))
    return max(sides, key=lambda side: max(map(speed, side.turns.values()), default=failed))


def compare(case: Case, opponent: Opponent, ours: Side, theirs: Side) -> list[Row]:
    """Returns the rows for one opponent."""
    who = f"{opponent.peer} {theirs.case}"
    if case.kind == "learn":
        rows = learn_rows(case, who, opponent.goal, ours.turns, theirs.turns)
    else:
        rows = [rate_row(case, who, opponent.goal, ours.turns, theirs.turns)]
    errors = [f"{side.peer}: {side.error}" for side in (ours, theirs) if side.error]
    return [replace(row, note="; ".join(errors)) for row in rows] if errors else rows


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        help="cases by name, such as 'ppo' or '*ppo'; default: all without a "
        "time limit of their own",
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns of each case")
    parser.add_argument("--seeds", type=int, default=5, help="turns of each learning case")
    parser.add_argument(
        "--resume", action="store_true", help="keep stored turns, and measure the missing ones"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--learning-seconds", type=float, default=120.0, help="limit for learning")
    parser.add_argument("--env", type=Path, default=CACHE, help="folder of the peers' environments")
    parser.add_argument("--python37", default="python3.7", help="for RLlib 0.8.5")
    parser.add_argument("--out", type=Path, default=STORE, help="file of the results")
    parser.add_argument("--markdown", type=Path, help="a page to write the table into")
    return parser.parse_args()


def main() -> int:
    """Measures, stores, and prints a table."""
    args = parse()
    cases = [case for case in CASES if is_chosen(case, args.only)]
    if not cases:
        names = ", ".join(case.name for case in CASES)
        print(f"--only: got {' '.join(args.only)!r}; the cases are {names}", file=sys.stderr)
        return 2
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)  # every process that this process starts inherits the cores
    facts = {**about(), "pinned to cores": cores}
    command = " ".join(["python", "benchmarks/suite.py", *sys.argv[1:]])
    store = read_runs(args.out)
    runner, rows = Runner(args), []
    for case in cases:
        before = store.get(case.name, {}) if args.resume else {}
        turns = args.seeds if case.kind == "learn" else args.repeats
        sides = measure(case, turns, runner, before.get("sides", ()))
        commit = facts["commit"]
        if commit not in before.get("commit", commit):
            commit = f"{before['commit']} and {commit}"
        store[case.name] = {"commit": commit, "command": command, "sides": sides}
        store["about"] = facts
        write_runs(args.out, store)  # after each case, because a run takes long
        rows += rows_of(case, sides)
    words = ", ".join(f"{key} {value}" for key, value in facts.items())
    text = f"{markdown(rows)}\n\n{words}.\n\nCommand: `{command}`\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(page(store, args.markdown.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
