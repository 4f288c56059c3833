"""The driver of `make integrations`, with a client that needs nothing installed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.integrations import run

CASES = """
import os
import subprocess
import subprocess
import sys
import time

def passes(folder):
    assert list(folder.iterdir()) == [] and os.environ["HF_HUB_OFFLINE"] == "1"
    (folder / "left").touch()
    return "loss 1.25"

def fails(folder):
    assert list(folder.iterdir()) == []
    print("what led to it")
    raise RuntimeError("broken client")

def hangs(folder):
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("worker", worker.pid, flush=True)
    time.sleep(600)

CASES = {"passes": passes, "fails": fails, "hangs": hangs}
"""


@pytest.fixture
def installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The one client that there is; returns the requirements of each environment that the driver makes for it."""
    folder = tmp_path / "fakes" / "fake"
    folder.mkdir(parents=True)
    (folder / "cases.py").write_text(CASES)
    (folder / "requirements.txt").write_text("# what it needs\ntyping_extensions>=4\n")
    made: list[str] = []

    def install(environment: Path, client: run.Client) -> None:
        made.append(client.requirements.read_text())
        (environment / "bin").mkdir(parents=True)
        python = environment / "bin/python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)

    monkeypatch.setattr(run, "find_clients", lambda: {"fake": run.Client(folder, "fakes")})
    monkeypatch.setattr(run, "install", install)
    monkeypatch.setattr(run, "ENVIRONMENTS", tmp_path / "environments")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return made


def test_integrations_print_a_line_for_each_case(installs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["fake", "--case", "passes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"fake: Python {sys.version.split()[0]}, torch ")
    assert ", typing_extensions " in lines[1]
    assert lines[2].split()[:3] == ["fake", "passes", "ok"]
    assert lines[2].endswith("loss 1.25")
    assert lines[3].startswith("1 cases, 0 failed")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_integrations_show_what_failed_and_stop_what_hangs(
    installs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--timeout", "3"]) == 1
    out = capsys.readouterr().out
    states = [line.split()[1:3] for line in out.splitlines() if line.startswith("fake ")]
    assert states == [["passes", "ok"], ["fails", "FAILED"], ["hangs", "FAILED"]]
    assert "    what led to it" in out
    assert "RuntimeError: broken client" in out
    assert "stopped after 3 s" in out
    worker = int(out.split("worker ")[1].split()[0])
    # On a busy machine it takes a moment for a killed process to be gone.
    deadline = time.monotonic() + 30
    while _runs(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(worker)
    assert "3 cases, 2 failed" in out


def test_integrations_make_an_environment_when_its_requirements_change(installs: list[str]) -> None:
    requirements = run.find_clients()["fake"].requirements
    for text in ("typing_extensions", "typing_extensions", "typing_extensions>=4"):
        requirements.write_text(text)
        assert run.main(["--case", "passes"]) == 0
    assert installs == ["typing_extensions", "typing_extensions>=4"]


def test_integrations_refuse_names_that_do_not_exist(installs: list[str]) -> None:
    for arguments in (["other"], ["--case", "other"]):
        with pytest.raises(SystemExit):
            run.main(arguments)


def test_integrations_describe_the_real_clients() -> None:
    clients = {path.parent.name for path in Path(run.__file__).parent.glob("*/cases.py")}
    assert {"torchtune", "lightning"} <= clients == set(run.find_clients())
    assert run.torch_pin() in (run.ROOT / "constraints.txt").read_text()
    assert os.fspath(run.ENVIRONMENTS.relative_to(run.ROOT)) + "/" in (run.ROOT / ".gitignore").read_text().split()


def test_torchtune_names_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchtune", "torchtune.training"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["torchtune"], "training", sys.modules["torchtune.training"], raising=False)
    monkeypatch.setattr(sys.modules["torchtune.training"], "Checkpointer", object, raising=False)
    module = importlib.import_module("lowbit_optim.integrations.torchtune")
    assert module.Checkpointer is object
    for missing in ("Other", "__path__"):
        with pytest.raises(AttributeError):
            getattr(module, missing)


def test_integrations_go_on_with_other_clients_where_an_environment_cannot_be_made(
    installs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake,) = run.find_clients().values()
    install = run.install

    def breaks_for_one(environment: Path, client: run.Client) -> None:
        if client.folder.name == "absent":
            raise subprocess.CalledProcessError(1, ["pip"])
        install(environment, client)

    monkeypatch.setattr(
        run, "find_clients", lambda: {"absent": run.Client(fake.folder.with_name("absent")), "fake": fake}
    )
    monkeypatch.setattr(run, "install", breaks_for_one)
    (fake.folder.parent / "absent").mkdir()
    (fake.folder.parent / "absent/requirements.txt").touch()
    assert run.main(["--case", "passes"]) == 1
    out = capsys.readouterr().out
    assert "absent: its environment cannot be made: pip ended with 1" in out
    assert "2 cases, 1 failed" in out
