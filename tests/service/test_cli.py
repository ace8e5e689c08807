"""The command line: what each outcome prints, where, and with which exit code."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from engine.errors import Cancelled, InputError, TargetError, WeightsError
from service.cli import main

Demo = Callable[[Path], Path]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Callable[[Demo], None]:
    """Puts a function in the place of service.demonstration.main."""

    def install(function: Demo) -> None:
        module = ModuleType("service.demonstration")
        module.main = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "service.demonstration", module)

    return install


def raising(error: BaseException) -> Demo:
    def function(out: Path) -> Path:
        raise error

    return function


def test_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"pfungst {version('pfungst')}\n"


def test_demo_prints_where_the_page_is(
    demo: Callable[[Demo], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo(lambda out: out / "index.html")
    assert main(["demo", "--out", str(tmp_path / "d")]) == 0
    assert capsys.readouterr().out == f"Open {tmp_path / 'd' / 'index.html'}\n"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["demo", "--ou", "x"], ["demo", "left-over"]])
def test_wrong_usage_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage: pfungst" in capsys.readouterr().err


def test_out_that_is_a_file_is_2(
    demo: Callable[[Demo], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo(raising(AssertionError("must not be called")))
    file = tmp_path / "page"
    file.write_text("mine")
    assert main(["demo", "--out", str(file)]) == 2
    assert capsys.readouterr().err == f"pfungst: error: --out {file} is a file; name a folder.\n"
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("no such class"), 2, "error: no such class"),
        (TargetError("already\n  predicted"), 2, "error: already predicted"),
        (WeightsError("cut short"), 2, "error: cut short"),
        (PermissionError(13, "Permission denied", "out"), 4, "error: [Errno 13] Permission denied: 'out'"),
        (ValueError("bad"), 4, "internal error: ValueError: bad (--debug shows where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Cancelled("stopped"), 130, "interrupted"),
    ],
)
def test_each_failure_is_one_line_and_its_code(
    demo: Callable[[Demo], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    line: str,
) -> None:
    demo(raising(error))
    assert main(["demo", "--out", str(tmp_path)]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"pfungst: {line}\n")


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_shows_the_traceback_before_or_after_the_command(
    demo: Callable[[Demo], None], tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    demo(raising(ValueError("bad")))
    argv = ["demo", "--out", str(tmp_path)]
    assert main(["--debug", *argv] if place == "before" else [*argv, "--debug"]) == 4
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):")
    assert err.endswith("pfungst: internal error: ValueError: bad\n")


FAKE_DEMO = """
import sys
from pathlib import Path
from types import ModuleType
from service.cli import main

def demo(out):
    {body}
    return Path(out)

module = ModuleType("service.demonstration")
module.main = demo
sys.modules["service.demonstration"] = module
sys.exit(main({argv!r}))
"""


@pytest.mark.parametrize(
    ("body", "argv", "unbuffered"),
    [
        ("pass", ["--help"], ""),
        ("pass", ["demo"], ""),
        ("pass", ["demo"], "1"),
        ("print('x' * 1_000_000)", ["demo"], ""),
    ],
    ids=["help", "last line", "last line, unbuffered", "midway"],
)
def test_a_closed_stdout_ends_quietly(body: str, argv: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    script = FAKE_DEMO.format(body=body, argv=argv)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, timeout=60
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_broken_connection_is_not_taken_for_a_closed_stdout() -> None:
    script = FAKE_DEMO.format(body="raise BrokenPipeError(32, 'Broken pipe')", argv=["demo"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (4, "pfungst: error: [Errno 32] Broken pipe\n")


def test_help_does_not_wait_for_torch() -> None:
    script = (
        "import sys, service.cli; print([name for name in ('torch', 'bentoml', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
