"""``eval locomo`` on a made-up file: real Mem0, real Qdrant, the real embedder; a tiny model with random weights."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import locomo_file
import pytest
import tiny_models

from inferscale_mem.cli import main as cli
from inferscale_mem.cli.eval import asking, command, report, summary
from inferscale_mem.cli.eval.judge import Judge, planted
from inferscale_mem.cli.eval.locomo import Question, read
from inferscale_mem.cli.eval.log import ANSWER, Log
from inferscale_mem.cli.eval.scoring import token_f1
from inferscale_mem.errors import EngineError, InputError

POLICIES = ("alone", "fact_chain(2, nearest)", "dialog_window(2)")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return locomo_file.save(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def given(model: str, data: Path) -> list[str]:
    policies = [part for policy in POLICIES[1:] for part in ("--policy", policy)]
    fixed = ["--engine", "transformers", "--dtype", "float32", "--model", model, "--record-gb", "0.05"]
    return ["eval", "locomo", "--data", str(data), *fixed, *policies, "--k", "2,4", "--max-tokens", "4", "--again", "1"]


@pytest.fixture(scope="module")
def written(given: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("out") / "eval.json"
    assert cli.main([*given, "--text-tail", "0,1", "--json", str(file)]) == 0
    return file


@pytest.fixture(scope="module")
def result(written: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    return found


def row(result: dict[str, Any], policy: str, k: int, text_tail: int = 0) -> dict[str, Any]:
    (found,) = [r for r in result["rows"] if (r["policy"], r["k"], r["text_tail"]) == (policy, k, text_tail)]
    return found


def test_every_condition_has_a_row_with_what_was_promised(result: dict[str, Any], written: Path) -> None:
    names = {"policy", "k", "n", "dll", "dll_se", "kl_mean", "kl_mean_se", "kl_first", "top1", "f1", "closed_kl"}
    names |= {"closed_ll", "encode_tokens_per_fact"}
    assert all(names <= set(one) for one in result["rows"])
    tails = [(policy, tail) for policy in POLICIES[1:] for tail in (0, 1)]
    expected = [("text", 0), ("text again", 0), ("none", 0), ("alone", 0), *tails]
    assert [(r["k"], r["policy"], r["text_tail"]) for r in result["rows"]] == [
        (k, *c) for k in (2, 4) for c in expected
    ]
    assert {r["n"] for r in result["rows"]} == {8, 2}
    assert row(result, "text again", 4)["n"] == 2
    assert result["meta"]["questions"] == {"c-1": 4, "c-2": 4}
    assert len(result["meta"]["data_sha256"]) == 64 and result["meta"]["torch"] and result["meta"]["fingerprint"]
    assert written.with_suffix(".png").stat().st_size > 1000
    assert written.with_name("eval-ttft.png").stat().st_size > 1000, "two text tails make a curve"


def test_plain_text_is_what_everything_is_measured_from(result: dict[str, Any]) -> None:
    for k in (2, 4):
        text, again = row(result, "text", k), row(result, "text again", k)
        assert (text["dll"], text["kl_mean"], text["top1"], text["closed_kl"]) == (0, 0, 1, None)
        assert row(result, "none", k)["ll"] - text["ll"] == pytest.approx(row(result, "none", k)["dll"], abs=1e-5)
        assert abs(again["kl_mean"]) < 1e-9, "the same request gives the same on this engine"
        alone = row(result, "alone", k)
        assert alone["kl_mean"] > 1e-3 and alone["closed_kl"] == 0
        assert alone["closed_ll"] == (0 if alone["dll"] < 0 else None)
        assert row(result, "none", k)["kl_mean"] > 1e-3
        assert alone["kl_mean_se"] > 0 and alone["facts"] == k


def test_context_costs_what_it_should(result: dict[str, Any]) -> None:
    own = row(result, "alone", 2)["encode_tokens_per_fact"]
    chained = row(result, "fact_chain(2, nearest)", 2)
    assert chained["encode_tokens_per_fact"] == own and chained["encode_tokens_per_own"] == 1
    assert row(result, "dialog_window(2)", 2)["encode_tokens_per_fact"] > 1.5 * own
    assert chained["encode_ms_per_fact"] > 0 and chained["answer_ms"] > 0


def test_what_is_left_to_prefill_is_nearer_to_text(result: dict[str, Any]) -> None:
    """The tail of two facts leaves one injected behind the header, which some policies have seen and others not."""
    for policy in POLICIES[1:]:
        assert row(result, policy, 2, 1)["kl_mean"] < row(result, policy, 2, 0)["kl_mean"]
        assert row(result, policy, 2, 1)["closed_kl"] > row(result, policy, 2, 0)["closed_kl"]


def test_categories_and_halves_add_up(result: dict[str, Any]) -> None:
    every = [r for r in result["by_category"] if (r["policy"], r["k"]) == ("alone", 4)]
    assert {(r["category"], r["n"]) for r in every} == {(1, 2), (2, 2), (4, 4)}
    whole = row(result, "alone", 4)
    assert sum(r["n"] * r["kl_mean"] for r in every) / 8 == pytest.approx(whole["kl_mean"], abs=1e-5)
    halves = [r for r in result["by_half"] if (r["policy"], r["k"]) == ("alone", 4)]
    assert [r["conversations"] for r in halves] == [["c-1"], ["c-2"]]
    assert sum(r["kl_mean"] for r in halves) / 2 == pytest.approx(whole["kl_mean"], abs=1e-5)


def test_it_goes_on_where_it_was_stopped(
    given: list[str], written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = written.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    file = tmp_path / "again.json"
    # All of the first conversation, half of the second, and a line that was cut off.
    half = len(lines) * 3 // 4
    file.with_suffix(".jsonl").write_text("\n".join([*lines[:half], lines[half][:20]]), encoding="utf-8")
    asked: list[str] = []
    real = asking.opened
    monkeypatch.setattr(asking, "opened", lambda one, *rest: asked.append(one.id) or real(one, *rest))
    assert cli.main([*given, "--text-tail", "0,1", "--json", str(file)]) == 0
    assert asked == ["c-2"]
    first, second = (json.loads(f.read_text(encoding="utf-8"))["rows"] for f in (written, file))
    timeless = [{name: v for name, v in one.items() if not name.endswith(("_ms", "_ms_per_fact"))} for one in first]
    assert timeless == [{name: v for name, v in one.items() if name in timeless[0]} for one in second]


def test_a_log_of_other_settings_is_not_mixed_in(
    given: list[str], written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    file.with_suffix(".jsonl").write_bytes(written.with_suffix(".jsonl").read_bytes())
    assert cli.main([*given, "--dates", "off", "--json", str(file)]) == 2
    assert "dates='behind'" in capsys.readouterr().err


def test_without_a_file_it_prints_a_table(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    some = ["--questions", "1", "--conversations", "c-2", "--categories", "4", "--max-tokens", "0", "--at-once", "2"]
    assert cli.main([*given, *some]) == 0
    shown = capsys.readouterr()
    assert "fact_chain(2, nearest)" in shown.out and "closed KL %" in shown.out
    assert "answers" in shown.err or "facts to encode" in shown.err or "adding fact" in shown.err


def test_facts_that_the_memorys_llm_extracts(given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model cannot extract anything; who answers in its place keeps what was said."""
    config, file = tmp_path / "mem0.json", tmp_path / "out.json"
    config.write_text(json.dumps({"llm": {"provider": "inferscale", "config": {"extraction": "write"}}}))
    said: list[str] = []

    def extract(self: Any, messages: Any, **kwargs: Any) -> str:
        said.append(messages[-1]["content"])
        found = [line for line in ("(8 May 2022) Ann: I live in Lyon now.",) if line in said[-1]]
        return json.dumps({"memory": [{"id": "0", "text": text, "attributed_to": "user"} for text in found]})

    monkeypatch.setattr("inferscale_mem.adapters.mem0.llm.EngineLLM.generate_response", extract)
    some = ["--facts", "extracted", "--mem0-config", str(config), "--conversations", "c-1", "--json", str(file)]
    assert cli.main([*given, *some]) == 0
    assert len(said) == 3, "five turns, in pairs"
    result = json.loads(file.read_text(encoding="utf-8"))
    alone = row(result, "alone", 2)
    assert (alone["facts"], alone["n"]) == (1, 4)
    assert alone["recall"] == pytest.approx((1 + 0 + 0.5) / 3), "the pair's turns are the evidence"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--policy", "fact_chian(8)"], "known are"),
        (["--k", "0"], "1 or more"),
        (["--questions", "0"], "1 or more"),
        (["--conversations", "c-9"], "c-1"),
        (["--categories", "3"], "No question"),
        (["--record-gb", "0.0003"], "--record-gb"),
        (["--judge-url", "http://127.0.0.1:1/v1"], "--judge-model"),
        (["--judge-url", "127.0.0.1:1/v1", "--judge-model", "m"], "http://"),
        (["--text-tail", "2"], "nothing to inject"),
        (["--record-gb", "nan"], "--record-gb"),
        (["--record-gb", "inf"], "--record-gb"),
    ],
)
def test_what_is_wrong_is_said_at_once(
    given: list[str], wrong: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*given, *wrong]) in (1, 2)
    assert says in capsys.readouterr().err


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An OpenAI-compatible server that finds answers right which share a letter pair with the right one."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({"path": self.path, "key": self.headers["Authorization"], **body})
            said = body["messages"][0]["content"]
            verdict = "Hm. RIGHT." if "judge: Lyon" in said else "wrong"
            reply = json.dumps({"choices": [{"message": {"content": verdict}}]}).encode()
            self.send_response(200 if body["model"] == "strict" else 404)
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", seen
    server.shutdown()
    server.server_close()


def test_a_judge_and_how_often_it_accepts_what_is_wrong(
    given: list[str], written: Path, endpoint: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    url, seen = endpoint
    file, key = tmp_path / "judged.json", tmp_path / "key"
    file.with_suffix(".jsonl").write_bytes(written.with_suffix(".jsonl").read_bytes())
    key.write_text("secret\n", encoding="utf-8")
    judge = ["--judge-url", url, "--judge-model", "strict", "--judge-key-file", str(key)]
    assert cli.main([*given, "--text-tail", "0,1", *judge, "--json", str(file)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    # Planted: Lyon for bread, bread for Lyon, in both conversations; it accepts Lyon for bread.
    measured = {"model": "strict", "planted_wrong": 4, "false_accept_rate": 0.5, "no_verdict": 0}
    assert result["meta"]["judge"] == measured
    assert all(one["judged_right"] == {"strict": 0.0} for one in result["rows"])
    assert {(one["path"], one["key"], one["temperature"]) for one in seen} == {
        ("/v1/chat/completions", "Bearer secret", 0)
    }
    asked = len(seen)
    assert cli.main([*given, "--text-tail", "0,1", *judge, "--json", str(file)]) == 0
    assert len(seen) == asked, "all verdicts are kept"
    assert json.loads(file.read_text(encoding="utf-8"))["meta"]["judge"] == measured


def test_answers_without_a_verdict_are_counted_and_left_out(
    given: list[str], written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(self: Judge, body: Any) -> str:
        return "RIGHT" if "judge: bread" in body["messages"][0]["content"] else "Hard to tell."

    monkeypatch.setattr(Judge, "_ask", ask)
    file = tmp_path / "judged.json"
    file.with_suffix(".jsonl").write_bytes(written.with_suffix(".jsonl").read_bytes())
    judge = ["--judge-url", "http://127.0.0.1:9/v1", "--judge-model", "m"]
    assert cli.main([*given, "--text-tail", "0,1", *judge, "--json", str(file)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    # Planted: Lyon for bread, on which it has no verdict, bread for Lyon, in both conversations.
    assert (result["meta"]["judge"]["planted_wrong"], result["meta"]["judge"]["false_accept_rate"]) == (4, 1.0)
    lines = [json.loads(line) for line in file.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines() if line]
    verdicts = [line for line in lines if line.get("kind") in ("verdict", "planted")]
    assert result["meta"]["judge"]["no_verdict"] == sum(line["accepted"] is None for line in verdicts) > 2


def test_a_judge_that_cannot_be_asked(
    endpoint: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferscale_mem.cli.eval.judge.RETRY_AFTER_S", ())
    with pytest.raises(InputError, match="404"):
        Judge(endpoint[0], "unknown").accepts("q", "a", "b")
    with pytest.raises(EngineError, match="--judge-url"):
        Judge("http://127.0.0.1:9/v1", "strict").accepts("q", "a", "b")
    assert not Judge("http://127.0.0.1:9/v1", "strict").accepts("q", "a", " ")


def test_a_key_follows_no_redirect(endpoint: tuple[str, list[dict[str, Any]]]) -> None:
    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(302)
            self.send_header("Location", f"{endpoint[0]}/chat/completions")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(InputError, match="answers 302"):
            Judge(f"http://127.0.0.1:{server.server_port}/v1", "strict", "secret").accepts("q", "a", "b")
    finally:
        server.shutdown()
        server.server_close()
    assert not endpoint[1]


@pytest.mark.parametrize(
    "reply", [b"HTTP/1.1 500 x\r\nContent-Length: 300\r\n\r\nno", b"", b"HTTP/1.1 200 x\r\n\r\n[[["]
)
def test_a_judge_that_breaks_off_is_said_so(monkeypatch: pytest.MonkeyPatch, reply: bytes) -> None:
    monkeypatch.setattr("inferscale_mem.cli.eval.judge.RETRY_AFTER_S", ())
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(EngineError, match="judge at"):
            Judge(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", "m").accepts("q", "a", "b")
        thread.join()


def test_planted_answers_are_wrong_in_any_language() -> None:
    given = ["雷克斯。", "雷克斯", "?", "Ünal", "U\u0308nal!"]
    questions = [Question(n, "q", answer, 4, ()) for n, answer in enumerate(given)]
    pairs = {(question.answer, wrong) for question, wrong in planted(questions)}
    assert pairs == {("雷克斯。", "Ünal"), ("雷克斯", "Ünal"), ("Ünal", "雷克斯。"), ("U\u0308nal!", "雷克斯。")}
    assert token_f1("雷克斯。", "雷克斯") == 1.0


def test_planted_answers_are_wrong_and_of_the_same_category(data: Path) -> None:
    (one, _), _ = read(data)
    assert [(question.answer, wrong) for question, wrong in planted(one.questions)] == [
        ("Lyon", "bread"),
        ("bread", "Lyon"),
    ]


@pytest.mark.parametrize(
    ("said", "right"),
    [
        *(("RIGHT", True), ("**Wrong**", False), ("Hm. Right.", True), ("WRONG. It is not right.", False)),
        ("The right answer is Lyon, so it is wrong", False),
        *((said, None) for said in ("Right or wrong? I", "RIGHT or WRONG? It is WRONG.", "Right/wrong: right")),
        *(
            (said, None)
            for said in ("That is not right.", "It isn't quite right", "It is not wrong.", "not entirely wrong")
        ),
        *(
            ("The right answer is Lyon, but this says bread, so it is", None),
            ("Lyon", None),
            ("It is right, or wrong", None),
        ),
    ],
)
def test_verdicts_are_read_as_they_are_meant(monkeypatch: pytest.MonkeyPatch, said: str, right: bool | None) -> None:
    monkeypatch.setattr(Judge, "_ask", lambda self, body: said)
    assert Judge("http://127.0.0.1:9/v1", "m").accepts("q", "Lyon", "bread") is right


def test_a_judge_that_fails_is_asked_again_and_costs_no_results(
    given: list[str], written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferscale_mem.cli.eval.judge.RETRY_AFTER_S", (0.0,))
    asked: list[str] = []

    def ask(self: Judge, body: Any) -> str:
        asked.append(body["messages"][0]["content"])
        raise EngineError("The judge at … answers 503")

    monkeypatch.setattr(Judge, "_ask", ask)
    file = tmp_path / "judged.json"
    file.with_suffix(".jsonl").write_bytes(written.with_suffix(".jsonl").read_bytes())
    judge = ["--judge-url", "http://127.0.0.1:9/v1", "--judge-model", "m"]
    assert cli.main([*given, "--text-tail", "0,1", *judge, "--json", str(file)]) == 1
    assert len(asked) == 2 and asked[0] == asked[1]
    assert json.loads(file.read_text(encoding="utf-8"))["rows"], (
        "what was measured is written before the judge is asked"
    )


@pytest.mark.parametrize("key", ["one\ntwo", "caf\u00e9", "a b"])
def test_a_key_that_cannot_be_sent_is_not_shown(
    given: list[str], tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key"
    file.write_text(key, encoding="utf-8")
    judge = ["--judge-url", "http://127.0.0.1:9/v1", "--judge-model", "m", "--judge-key-file", str(file)]
    assert cli.main([*given, *judge]) == 2
    said = capsys.readouterr().err
    assert "on one line" in said and key not in said


def test_secrets_are_left_out_of_what_is_published() -> None:
    config = {"api_key": "sk-1", "keys": ["sk-2"], "model": "m", "max_tokens": 5, "headers": [{"Authorization": "b"}]}
    published = {
        "api_key": "(left out)",
        "keys": "(left out)",
        "model": "m",
        "max_tokens": 5,
        "headers": [{"Authorization": "(left out)"}],
    }
    assert command.without_secrets({"llm": {"config": config}}) == {"llm": {"config": published}}


def test_facts_that_are_others_than_before_are_not_mixed_in(
    given: list[str], written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    lines = [json.loads(line) for line in written.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line |= {"facts_sha256": "0" * 64} if line.get("kind") == "encoded" else {}
    kept = [json.dumps(line) for line in lines[:-1]]
    file.with_suffix(".jsonl").write_text("\n".join(kept), encoding="utf-8")
    assert cli.main([*given, "--text-tail", "0,1", "--json", str(file)]) == 2
    assert "c-2: the facts are not those" in capsys.readouterr().err


def test_a_tail_of_all_that_was_found_is_no_condition(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The conversations have five facts, so ten cannot be found."""
    assert cli.main([*given, "--k", "10", "--text-tail", "5", "--max-tokens", "0"]) == 2
    assert "c-1, question 0: Only 5 facts were found, and a text tail of 5 injects none." in capsys.readouterr().err


def test_policies_are_compared_over_the_questions_that_both_were_asked() -> None:
    def answered(policy: str, question: int, kl: float) -> dict[str, Any]:
        names = {"conversation": f"c-{question % 2}", "question": question, "policy": policy, "text_tail": 0, "k": 10}
        return {**names, "kl_mean": kl, "dll": -kl, "facts": 10, "category": 4}

    default = "fact_chain(8, nearest)"
    with Log(None, {}) as log:
        for question in range(20):
            easy = question < 10
            log.add(ANSWER, answered("alone", question, 0.1 if easy else 1.0))
            log.add(ANSWER, answered(default, question, 0.01 if easy else 0.1))
            if easy:
                log.add(ANSWER, answered("fact_window(4)", question, 0.05))
        rows = {row["policy"]: row for row in summary.rows(log)}
    window = rows["fact_window(4)"]
    assert window["kl_mean"] < rows[default]["kl_mean"], "it was asked the easy ones"
    assert window["kl_less_default"] == pytest.approx(0.04) and window["kl_less_default_n"] == 10
    assert rows[default]["kl_less_default"] == 0 and rows[default]["f1_n"] == 0
    drawn = report._lines(list(rows.values()))
    assert set(drawn) == {"alone (n=20)", f"{default} (n=20)", "fact_window(4) (n=10)"}


def test_where_there_is_no_gap_no_share_of_it_is_closed() -> None:
    with Log(None, {}) as log:
        for policy, dll in (("alone", 0.1), ("fact_window(4)", 0.2)):
            names = {"conversation": "c", "question": 0, "policy": policy, "text_tail": 0, "k": 10, "category": 4}
            log.add(ANSWER, {**names, "kl_mean": 0.5, "dll": dll})
        assert [row["closed_ll"] for row in summary.rows(log)] == [None, None]
