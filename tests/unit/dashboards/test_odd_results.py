"""Tests that the report of an odd or hostile folder of results is written without an exception."""

from __future__ import annotations

from pathlib import Path

import pytest

from polopt.dashboards.report import write_report

GOOD = (
    b'{"training_iteration":1,"num_env_steps_sampled_lifetime":3,"config":{"env":"A"},'
    b'"optimizer":{"name":"sync_samples","driver":{"share":{"wait":0.5}}},'
    b'"env_runners":{"episode_return_mean":1}}\n'
)
ODD = {
    "nothing": b"",
    "null": b"null\n[1]\n{}\n",
    "text": b'{"training_iteration":"x","optimizer":"y","config":[1]}\n',
    "infinite": GOOD.replace(b":3,", b":Infinity,").replace(b":1}", b":-1e308}"),
    "negative": GOOD.replace(b":3,", b":-3,").replace(b"0.5", b"-1"),
    "no names": GOOD.replace(b'"A"', b'""').replace(b"sync_samples", b" "),
    "surrogate": GOOD.replace(b'"A"', b'"\\ud800"').replace(b"wait", b"\\udfff"),
    "lists": GOOD.replace(b'{"wait":0.5}', b'[1,"x",{}]').replace(b'"A"', b'[1,{"a":2}]'),
    "deep": GOOD.replace(b'"A"', b'{"a":' * 300 + b"1" + b"}" * 300),
    "script": GOOD.replace(b'"A"', b'"</script><script>"'),
}


@pytest.mark.parametrize("data", ODD.values(), ids=ODD)
def test_report_of_odd_results_is_written(tmp_path: Path, data: bytes) -> None:
    for name, content in (("odd", data), ("other", data), ("good", GOOD)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_bytes(content)
        write_report(tmp_path, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 0


@pytest.mark.parametrize(
    "text", ["[]", '"x"', "{}", "[" * 100_000, '{"name":3,"tab":{"plots":[1]}}']
)
def test_report_with_an_odd_tab_is_written(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_bytes(GOOD)
    (tmp_path / "optimizer.json").write_text(text)
    write_report(tmp_path, tmp_path / "report.html")
