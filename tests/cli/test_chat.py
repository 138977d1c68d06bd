"""The chat command: real memory, embedder and store; the engine is the fake one, and repeats the last fact it gets."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inferscale_mem.cli import chat
from inferscale_mem.cli.chat.script import ASKED, TOLD, USER
from inferscale_mem.cli.chat.session import TEXT_RUNS
from inferscale_mem.config import EngineConfig, InferScaleConfig
from inferscale_mem.errors import EngineError, InferScaleError, StoreLockedError
from inferscale_mem.testing import FakeEngine
from inferscale_mem.types import PromptPlan, Sampling

Run = Callable[..., int]


class House:
    """What stands behind the command.

    Attributes:
        author: writes the answers.
        engines: all that were opened.
        options: of the engines to come.
        failure: raised in place of opening one.
    """

    def __init__(self) -> None:
        self.author: Callable[[PromptPlan, Sampling], str] = lambda plan, sampling: "You said: " + self.fact(plan)
        self.engines: list[FakeEngine] = []
        self.options: dict[str, Any] = {}
        self.failure: InferScaleError | None = None

    def open_engine(self, config: InferScaleConfig, key: bytes) -> FakeEngine:
        if self.failure is not None:
            raise self.failure
        self.engines.append(FakeEngine(lambda *a: self.author(*a), key=key, **self.options))
        return self.engines[-1]

    def fact(self, plan: PromptPlan) -> str:
        """The most similar fact, which is served last."""
        return self.engines[-1].tokenizer.decode(plan.facts[-1].token_ids) if plan.facts else ""

    def prompts(self) -> list[str]:
        """Texts of all prompts since the latest start."""
        return [self.engines[-1].tokenizer.decode(plan.token_ids) for plan, _ in self.engines[-1].requests]


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    house = House()
    monkeypatch.setattr("inferscale_mem.adapters.mem0.adapter.open_engine", house.open_engine)
    return house


@pytest.fixture
def run(house: House, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*options: str, lines: str = "") -> int:
        parser = argparse.ArgumentParser()
        chat.add_arguments(parser)
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        return chat.run(parser.parse_args(options))

    return run


@pytest.fixture
def short_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing a dozen facts takes a while, and once is enough."""
    monkeypatch.setattr("inferscale_mem.cli.chat.script.TOLD", TOLD[:2])


# The scripted conversation.


def test_with_nothing_to_read_it_plays_a_conversation_and_leaves_nothing_behind(
    run: Run, house: House, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("--user", "ada", lines="I live in Oslo.\n") == 0
    capfd.readouterr()
    assert run("--json", str(tmp_path / "figures.json")) == 0
    shown = capfd.readouterr().out
    assert len(house.engines) == 3, "it restarts once"
    for text in (*TOLD, *(question for question, _ in ASKED)):
        assert f"you> {text}" in shown
    assert shown.count("15 of 15 facts injected") == 6 and shown.count("as plain text") == 3
    assert "3 of 3 questions answered from memory after the restart" in shown and "still knows" in shown
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [figure["restarted"] for figure in figures] == [False] * 3 + [True] * 3
    assert all(figure["ok"] and figure["report"]["facts_injected"] == 15 for figure in figures)
    for user, known in ((USER, 0), ("ada", 1)):
        run("--user", user, lines="/quit\n")
        assert f"I know {known} fact" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "answer", "trouble"),
    [({}, "I do not know.", "does not say 'Biscuit'"), ({"connector": False}, "Biscuit walnut March", "no fact")],
)
@pytest.mark.usefixtures("short_script")
def test_the_scripted_conversation_fails_aloud(
    run: Run, house: House, capfd: pytest.CaptureFixture[str], options: dict[str, Any], answer: str, trouble: str
) -> None:
    house.options, house.author = options, lambda plan, sampling: answer
    assert run() == 1
    shown = capfd.readouterr().out
    assert f"FAILED: {ASKED[0][0]}" in shown and trouble in shown and "still knows" not in shown


@pytest.mark.usefixtures("short_script")
def test_a_scripted_conversation_that_breaks_leaves_nothing_behind(
    run: Run, house: House, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(plan: PromptPlan, sampling: Sampling) -> str:
        raise EngineError("out of order")

    house.author = broken
    assert run() == 1
    assert "EngineError: out of order" in capfd.readouterr().err
    run("--user", USER, lines="/facts\n")
    assert "Nothing yet." in capfd.readouterr().out


# Lines from a pipe.


def test_what_a_line_tells_is_recalled_by_the_next_and_by_the_next_run(
    run: Run, house: House, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("--user", "ada", lines="I live in Oslo.\nWhere do I live?\n") == 0
    shown = capfd.readouterr().out
    assert "remembered: I live in Oslo." in shown
    assert "nothing to recall" in shown and "1 of 1 facts injected" in shown
    assert "I live in Oslo." in house.prompts()[1]
    assert run("--user", "ada", lines="Where do I live?") == 0
    assert "I know 1 fact about you" in capfd.readouterr().out
    assert "I live in Oslo." in house.prompts()[0]
    assert run("--user", "bob", lines="Where do I live?") == 0
    assert "I know 0 facts about you" in capfd.readouterr().out
    assert "Oslo" not in house.prompts()[0]


def test_nothing_is_kept_twice(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run(lines="I live in Oslo.\ni live in oslo.\n/remember I live in Oslo.\n/remember Oslo is nice.\n/facts\n")
    shown = capfd.readouterr().out
    assert shown.count("remembered:") == 1 and "I knew that." in shown
    assert "  1  I live in Oslo.\n  2  Oslo is nice.\n" in shown


def test_commands(run: Run, house: House, capfd: pytest.CaptureFixture[str]) -> None:
    lines = ["/facts", "I live in Oslo.", "I have a dog.", "/forget 1", "/forget 7", "/forget x", "/facts", "", "/quit"]
    assert run(lines="\n".join([*lines, "Hello?"])) == 0
    shown = capfd.readouterr().out
    assert "Nothing yet." in shown and "Forgotten: I live in Oslo." in shown and "There is no fact 7" in shown
    assert "/forget N" in shown, "a command that cannot be read shows the help"
    assert "  1  I have a dog." in shown
    assert len(house.prompts()) == 2, "commands and empty lines are not for the model, nor is what follows /quit"


def test_a_comparison_sends_as_many_tokens_without_records_and_never_the_same(
    run: Run, house: House, capfd: pytest.CaptureFixture[str]
) -> None:
    run("--compare", lines="I live in Oslo.\nWhere do I live?\nWhere do I live?\n/compare\nWhere do I live?\n")
    shown = capfd.readouterr().out
    assert shown.count("as plain text") == 2
    requests = house.engines[-1].requests
    answers = [plan for plan, sampling in requests if sampling.max_tokens != 1]
    compared = [plan for plan, sampling in requests if sampling.max_tokens == 1]
    assert len(answers) == 4 and len(compared) == 2 * (1 + TEXT_RUNS)
    headers = compared[:: 1 + TEXT_RUNS]
    plains = [plan for plan in compared if plan not in headers]
    asked = [(answers[1 + n // TEXT_RUNS], headers[n // TEXT_RUNS], plain) for n, plain in enumerate(plains)]
    for plan, header, plain in asked:
        assert not any(segment.record for segment in (*header.segments, *plain.segments))
        assert tuple(header.token_ids) == plan.segments[0].token_ids
        assert len(plain.token_ids) == len(plan.token_ids)
        different = [
            i for i, pair in enumerate(zip(plan.token_ids, plain.token_ids, strict=True)) if len(set(pair)) > 1
        ]
        end = len(header.token_ids)
        assert different and end - 4 <= min(different) and max(different) < end
    assert len({tuple(plain.token_ids) for plain in plains}) == len(plains) == 2 * TEXT_RUNS


def test_earlier_turns_go_along_if_wanted(run: Run, house: House) -> None:
    run("--history", "1", lines="Hello there?\nAnd now?\nAnd then?\n")
    _, second, third = house.prompts()
    assert "Hello there?" in second and "You said" in second
    assert "And now?" in third and "Hello there?" not in third
    run(lines="Hello there?\nAnd now?\n")
    assert "Hello there?" not in house.prompts()[1], "the packaged small model gets none"


def test_the_model_may_say_what_is_kept(run: Run, house: House, capfd: pytest.CaptureFixture[str]) -> None:
    def author(plan: PromptPlan, sampling: Sampling) -> str:
        if sampling.json_schema is None:
            return "Nice."
        asked = house.engines[-1].tokenizer.decode(plan.token_ids[-100:])
        return '{"memory": [{"text": "Oslo is home now."}]}' if "Oslo" in asked else '{"memory": []}'

    house.author = author
    assert run("--infer", lines="Oslo is home now. Good to know.\n") == 0
    shown = capfd.readouterr().out
    assert shown.count("remembered: ") == 1 and "remembered: Oslo is home now." in shown


def test_a_line_that_cannot_be_answered_does_not_end_the_conversation(
    run: Run, house: House, capfd: pytest.CaptureFixture[str]
) -> None:
    house.options = {"max_model_len": 600}
    assert run("--max-tokens", "50", lines=f"{'x' * 700}?\nHello?\n") == 0
    shown = capfd.readouterr().out
    assert "PromptTooLong" not in shown and "the model takes 600" in shown and "You said:" in shown


# What goes wrong.


@pytest.mark.parametrize("options", [["--top-k", "0"], ["--max-tokens", "0"], ["--history", "-1"]], ids=str)
def test_options_out_of_range_are_refused(run: Run, capfd: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert run(*options, lines="Hello?\n") == 2
    assert options[0] in capfd.readouterr().err


def test_an_engine_that_does_not_start_is_named_and_its_log_too(
    run: Run, house: House, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    house.failure = EngineError("no engine today")
    assert run(lines="Hello?\n") == 1
    captured = capfd.readouterr()
    assert "EngineError: no engine today" in captured.err and str(home / "inferscale" / "chat.log") in captured.err
    assert "starting the engine: failed" in captured.out


def test_a_home_that_cannot_be_made_is_named(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run("--home", str(tmp_path / "file"), lines="Hello?\n") == 2
    assert "ConfigError" in (said := capfd.readouterr().err) and "--home" in said


def test_a_home_in_use_is_named(run: Run, house: House, capfd: pytest.CaptureFixture[str]) -> None:
    inside: list[int] = []

    def ask_again(plan: PromptPlan, sampling: Sampling) -> str:
        inside.append(run(lines="Hello?\n"))
        return "Yes."

    house.author = ask_again
    assert run(lines="Hello?\n") == 0
    assert inside == [1]
    assert StoreLockedError.__name__ in capfd.readouterr().err


def test_an_interrupt_ends_the_conversation_and_closes_everything(
    run: Run, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logging.disable", lambda level: None)

    def interrupted() -> Iterator[str]:
        yield "I live in Oslo.\n"
        raise KeyboardInterrupt

    monkeypatch.setattr("inferscale_mem.cli.chat.command._piped", lambda first, terminal: interrupted())
    assert run(lines="anything\n") == 0
    assert run("--verbose", lines="/facts\n") == 0, "the store's lock is released"


def test_the_engine_kind_can_be_chosen(run: Run, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineConfig] = []
    real = house.open_engine
    monkeypatch.setattr(
        "inferscale_mem.adapters.mem0.adapter.open_engine", lambda c, k: seen.append(c.engine) or real(c, k)
    )
    assert run("--engine", "transformers", lines="/quit\n") == 0
    assert [config.kind for config in seen] == ["transformers"]
