"""Type checkers accept the documentation's code and find a user's errors. Editors complete options.

The checkers get no path of polopt. They find polopt as it is installed, as a user's checkers do.
basedpyright is a variant of pyright. pip installs it together with Node, so it needs no other
download.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BIN = Path(sys.executable).parent
USERS = "script_of_a_user.py"
#: A user's script. The comment of a line is a part of the error that both checkers find there.
SCRIPT = """
import polopt

trainer = polopt.SyncPPO(env="CartPole-v1", num_workers=0, lr=1e-3, model={"use_lstm": True})
mean: float = trainer.train()["episode_return_mean"]
schedule = polopt.A3C(env="CartPole-v1", lr=[[0, 1e-3], [1_000, 1e-4]], num_env_runners=2)
own = polopt.PolicyOptimizerTrainer(env="CartPole-v1", optimizer="mine", option_of_mine=3)
polopt.train("SyncPPO", env="CartPole-v1", stop={"training_iteration": 1}, lambda_=0.9)
polopt.train(polopt.PolicyOptimizerTrainer, option_of_mine=3)
trainer.stop()
with polopt.Collector("CartPole-v1", total_frames=100) as collector:
    for batch in collector:
        steps: int = batch.num_env_steps

polopt.SyncPPO(env="CartPole-v1", num_wrokers=0)  # num_wrokers
polopt.SyncPPO(env="CartPole-v1", num_workers="two")  # num_workers
polopt.SyncPPO(env="CartPole-v1", transport="zeromq")  # transport
polopt.SyncPPO(env="CartPole-v1", max_rollout_lag=3)  # max_rollout_lag
polopt.SyncPPO(env="CartPole-v1", model={"use_lsmt": True})  # use_lsmt
polopt.train("SyncPPO", env="CartPole-v1", verbos=0)  # train
polopt.train("SyncPPO", env="CartPole-v1", num_wokers=2)  # train
polopt.SyncPP0(env="CartPole-v1")  # SyncPP0
trainer.comput_single_action([0.0])  # comput_single_action
polopt.RolloutConfig(num_workers="two")  # num_workers
"""


#: The part of an error of pyright that names an unknown option of `polopt.train`.
UNKNOWN = re.compile(r'parameter "(\w+)" of type "NoSuchOption"')


def tool(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join([str(BIN), os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def documented(folder: Path) -> list[Path]:
    """Writes the code of each page that uses polopt as one script. A block that begins with the
    name of a file becomes that file."""
    scripts = []
    for page in PAGES:
        if page.stem == "api":  # has signatures, and no programs
            continue
        joined = []
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            first = re.match(r"# (\w+\.py)\n", block)
            if first:
                scripts.append(folder / first[1])
                scripts[-1].write_text(block)
            # Type checkers do not know the paths of RLlib below `polopt.rllib`. They are no files.
            elif "polopt." in block and not re.search(r"(from|import) polopt\.rllib\.", block):
                joined.append(block)
        if joined:
            scripts.append(folder / f"page_{page.stem.replace('-', '_').lower()}.py")
            scripts[-1].write_text("\n".join(joined))
    return scripts


def mypy(folder: Path) -> list[tuple[str, int, str]]:
    """Returns file, line and text of each error that mypy reports in strict mode."""
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    command += ["--config-file", os.devnull, "--cache-dir", os.devnull, "."]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, 1), done.stderr
    found = re.findall(r"^(.+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    return [(name, int(number), text) for name, number, text in found]


def pyright(folder: Path) -> list[tuple[str, int, str]]:
    """Returns file, line and text of each error that pyright reports in standard mode."""
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard"}))
    command = [tool("basedpyright"), "--outputjson", "--pythonpath", sys.executable, "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1, one["message"])
        for one in found
        if one["severity"] == "error"
    ]


@pytest.fixture(scope="module", params=[mypy, pyright], ids=lambda check: check.__name__)
def errors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, list[tuple[str, int, str]]]:
    """Returns a checker, and its errors in the code of the documentation and in a user's script. It
    checks both at once, because it needs most of its time for polopt and for torch."""
    folder = tmp_path_factory.mktemp("checked")
    assert len(documented(folder)) > 10
    (folder / USERS).write_text(SCRIPT)
    return request.param, request.param(folder)


def test_code_of_the_documentation_is_accepted(errors: Any) -> None:
    assert [one for one in errors[1] if Path(one[0]).name != USERS] == []


def test_errors_of_a_user_are_found_and_nothing_else(errors: Any) -> None:
    wrong = {
        number: line.split("  # ")[1]
        for number, line in enumerate(SCRIPT.splitlines(), 1)
        if "  # " in line
    }
    check, found = errors[0], [one for one in errors[1] if Path(one[0]).name == USERS]
    assert {number for _, number, _ in found} == set(wrong)
    for number, said in wrong.items():
        assert any(said in text for _, at, text in found if at == number), said
    if check is pyright:  # it said that "SyncPPO" is not a class of trainers
        named = {match[1] for *_, text in found if (match := UNKNOWN.search(text))}
        assert named == {"verbos", "num_wokers"}


def test_editor_completes_options(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('import polopt\n\npolopt.SyncPPO(env="CartPole-v1", num_)\n')
    (tmp_path / "pyrightconfig.json").write_text("{}")
    server = LanguageServer(tool("basedpyright-langserver"), tmp_path)
    try:
        labels = server.completions(script, line=2)
    finally:
        server.close()
    assert {"num_workers=", "num_envs_per_worker=", "num_sgd_iter=", "num_epochs="} <= labels


class LanguageServer:
    """A client of a language server (JSON-RPC on standard input and output)."""

    def __init__(self, command: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [command, "--stdio"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
        )
        self._number = 0
        uri = folder.as_uri()
        self.request(
            "initialize",
            processId=os.getpid(),
            rootUri=uri,
            capabilities={"workspace": {"configuration": True}},
            workspaceFolders=[{"uri": uri, "name": "user"}],
        )
        self._send(method="initialized", params={})

    def completions(self, script: Path, line: int) -> set[str]:
        """Returns the labels of the completions that the server offers after `num_` in a line."""
        text = script.read_text()
        document = {"uri": script.as_uri(), "languageId": "python", "version": 1, "text": text}
        self._send(method="textDocument/didOpen", params={"textDocument": document})
        position = {"line": line, "character": text.splitlines()[line].index("num_)") + 4}
        answer = self.request(
            "textDocument/completion",
            textDocument={"uri": script.as_uri()},
            position=position,
        )
        items = answer["items"] if isinstance(answer, dict) else answer
        return {item["label"] for item in items}

    def request(self, method: str, **params: Any) -> Any:
        """Sends a request and returns its result. Answers requests of the server meanwhile."""
        self._number += 1
        self._send(id=self._number, method=method, params=params)
        while True:
            message = self._receive()
            if "method" in message and "id" in message:
                items = message.get("params", {}).get("items", [])
                settings = {"pythonPath": sys.executable}
                answer = [settings if one.get("section") == "python" else {} for one in items]
                self._send(id=message["id"], result=answer or None)
            elif message.get("id") == self._number:
                return message["result"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)

    def _send(self, **message: Any) -> None:
        assert self._process.stdin is not None
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        size = 0
        while line := self._process.stdout.readline().strip():
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        assert size, "the server has ended"
        found: dict[str, Any] = json.loads(self._process.stdout.read(size))
        return found
