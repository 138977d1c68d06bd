"""The command line's frame: which command runs, what errors look like, and exit codes."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import types

import pytest

import inferscale_mem
from inferscale_mem.cli import main as cli
from inferscale_mem.errors import EngineError, InferScaleError, InputError, MissingDependencyError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A subcommand "try" whose ``run`` a test may set."""
    module = types.ModuleType("trial", "Try it.")
    module.add_arguments = lambda parser: parser.add_argument("--n", type=int, default=0)
    module.run = lambda args: 0
    monkeypatch.setitem(sys.modules, "trial", module)
    monkeypatch.setitem(cli.COMMANDS, "try", ("trial", "try it"))
    return module


def test_nothing_at_all_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr().err
    assert all(f"  {name} " in shown for name in cli.COMMANDS)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"inferscale-mem {inferscale_mem.__version__}\n"
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown and what in shown for name, (_, what) in cli.COMMANDS.items())


@pytest.mark.parametrize("argv", [["nonsense"], ["doctor", "--nonsense"], ["try", "--n", "x"]])
def test_a_wrong_command_line(argv: list[str], command: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert "usage: inferscale-mem" in capsys.readouterr().err


def test_arguments_reach_the_command(command: types.ModuleType) -> None:
    command.run = lambda args: args.n
    assert cli.main(["try", "--n", "7"]) == 7


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("No facts.\nAdd some."), 2, "error: No facts. Add some."),
        (EngineError("It stopped."), 1, "error: It stopped."),
        (MissingDependencyError("vllm", "vllm"), 2, "error: 'vllm' is not installed. Install it with: "),
    ],
)
def test_errors_are_one_line(
    error: InferScaleError, code: int, line: str, command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    command.run = run
    assert cli.main(["try"]) == code
    shown = capsys.readouterr().err
    assert shown.startswith(line) and shown.count("\n") == 1


def test_ctrl_c(command: types.ModuleType) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command.run = run
    assert cli.main(["try"]) == 130


def test_other_errors_are_not_hidden(command: types.ModuleType) -> None:
    def run(args: argparse.Namespace) -> int:
        raise RuntimeError("a bug")

    command.run = run
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["try"])


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(cli.COMMANDS[name][0])
    assert callable(module.run)
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: inferscale-mem {name}" in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_crash() -> None:
    code = (
        "import sys, types; from inferscale_mem.cli import main as cli; m = types.ModuleType('m', 'm'); "
        "m.add_arguments = lambda p: None; m.run = lambda a: [print('x' * 100) for _ in range(10000)] and 0; "
        "sys.modules['m'] = m; cli.COMMANDS['try'] = ('m', 'm'); sys.exit(cli.main(['try']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 1
    assert process.stderr.read() == b""


def test_help_is_light() -> None:
    code = "import sys; from inferscale_mem.cli import main as cli; cli._parser().format_help(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "vllm", "transformers", "mem0", "langchain_core"} & set(loaded)
