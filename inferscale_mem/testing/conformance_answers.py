"""Answers: how they are sampled, streamed, ended and refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from inferscale_mem.errors import InputError, PromptTooLongError
from inferscale_mem.protocols import Engine
from inferscale_mem.testing.scene import GREEDY, Scene, Segment, collect, plain, raises
from inferscale_mem.types import PromptPlan, Sampling

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["tea", "rain"]}},
    "required": ["answer"],
    "additionalProperties": False,
}


class AnswerConformance:
    """See ``conformance.EngineConformance``."""

    def test_the_engine_says_what_it_is(self, engine: Engine) -> None:
        info = engine.info
        assert info.model and info.fingerprint and info.dtype and info.version
        assert min(info.max_model_len, info.block_size, info.bytes_per_token, info.record_bytes) > 0
        assert info.connector and info.verifies_handles

    def test_control_tokens_are_ordinary_characters_in_text_of_people(self, engine: Engine) -> None:
        tokenizer = engine.tokenizer
        rendered = tokenizer.render([{"role": "user", "content": "Hi."}])
        literal, parsed = tokenizer.encode(rendered, literal=True), tokenizer.encode(rendered, literal=False)
        assert tokenizer.decode(literal) == rendered
        assert len(parsed) < len(literal)
        assert not set(literal) & {token for token in parsed if not tokenizer.decode([token])}

    def test_one_token_is_enough(self, engine: Engine) -> None:
        answer = Scene(engine).ask(Scene(engine).plan([]), Sampling(max_tokens=1, temperature=0.0, ignore_eos=True))
        assert (len(answer.tokens), answer.finish_reason) == (1, "length")

    def test_several_answers_share_one_report(self, engine: Engine) -> None:
        scene = Scene(engine)
        memories = scene.memories(2)
        scene.encode_all(memories)
        plan = scene.plan(memories)
        sampling = Sampling(max_tokens=6, n=3, seed=7, temperature=1.0, ignore_eos=True)
        chunks = list(engine.generate(plan, sampling))
        answers = [collect(chunks, plan, index) for index in range(3)]
        assert [len(answer.tokens) for answer in answers] == [6, 6, 6]
        assert {chunk.index for chunk in chunks} == {0, 1, 2}
        assert answers[0].report.facts_injected == 2

    def test_a_seed_makes_answers_repeat(self, engine: Engine) -> None:
        scene = Scene(engine)
        plan = scene.plan([])
        sampling = Sampling(max_tokens=8, seed=3, temperature=1.0, ignore_eos=True)
        assert scene.ask(plan, sampling).tokens == scene.ask(plan, sampling).tokens

    def test_a_stop_string_ends_the_text_before_it(self, engine: Engine) -> None:
        scene = Scene(engine)
        plan = scene.plan([])
        sampling = replace(GREEDY, max_tokens=24, ignore_eos=True)
        whole = scene.ask(plan, sampling).text
        assert len(whole) > 4
        stop = whole[len(whole) // 2 :][:3]
        chunks = list(engine.generate(plan, replace(sampling, stop=("never said", stop))))
        answer = collect(chunks, plan)
        assert answer.finish_reason == "stop"
        assert answer.text == whole[: whole.index(stop)]

    def test_an_answer_that_a_stop_string_ended_has_its_report(self, engine: Engine) -> None:
        scene = Scene(engine)
        memories = scene.memories(2)
        scene.encode_all(memories)
        plan = scene.plan(memories)
        sampling = replace(GREEDY, max_tokens=24, ignore_eos=True)
        whole = scene.ask(plan, sampling)
        stop = whole.text[len(whole.text) // 2 :][:3]
        before = engine.status().counters
        answer = scene.ask(plan, replace(sampling, stop=(stop,)))
        assert answer.finish_reason == "stop"
        assert (answer.report.facts_injected, answer.report.missed) == (2, ())
        assert answer.report.tokens_injected == whole.report.tokens_injected
        told = engine.status().counters
        assert told["injected"] - before["injected"] == 2, "the answer is counted once"

    def test_whole_vocabulary_of_log_probabilities(self, engine: Engine) -> None:
        scene = Scene(engine)
        answer = scene.ask(scene.plan([]), Sampling(max_tokens=1, temperature=0.0, logprobs=-1))
        assert abs(sum(math.exp(value) for value in answer.logprobs.values()) - 1) < 1e-3
        assert answer.logprobs[answer.tokens[0]] == max(answer.logprobs.values())
        few = scene.ask(scene.plan([]), Sampling(max_tokens=1, temperature=0.0, logprobs=3))
        assert 3 <= len(few.logprobs) <= 4
        assert all(abs(value - answer.logprobs[token]) < 0.05 for token, value in few.logprobs.items())

    def test_an_answer_that_fits_a_schema(self, engine: Engine) -> None:
        scene = Scene(engine)
        answer = scene.ask(scene.plan([]), Sampling(max_tokens=64, temperature=0.0, json_schema=SCHEMA))
        assert answer.finish_reason == "stop"
        assert json.loads(answer.text)["answer"] in ("tea", "rain")

    def test_unless_told_otherwise_an_answer_may_fill_the_context(self, engine: Engine) -> None:
        scene = Scene(engine)
        words = scene.suffix.token_ids
        count = engine.info.max_model_len - 24
        prompt = (words * (1 + count // len(words)))[:count]
        plan = PromptPlan((Segment("text", prompt),))
        answer = scene.ask(plan, Sampling(temperature=0.0, ignore_eos=True))
        assert (len(answer.tokens), answer.finish_reason) == (24, "length")

    def test_too_long_prompts_are_refused_before_anything_starts(self, engine: Engine) -> None:
        scene = Scene(engine)
        limit = engine.info.max_model_len
        for count, max_tokens in ((limit + 1, None), (limit, None), (limit - 4, 5)):
            plan = PromptPlan((Segment("text", scene.suffix.token_ids[:1] * count),))
            with raises(PromptTooLongError):
                list(engine.generate(plan, Sampling(max_tokens=max_tokens)))
        assert scene.ask(scene.plan([])).tokens

    def test_requests_that_make_no_sense_are_refused(self, engine: Engine) -> None:
        scene = Scene(engine)
        plan = scene.plan([])
        with raises(InputError):
            list(engine.generate(PromptPlan(()), GREEDY))
        wrong: list[Sampling] = [
            Sampling(max_tokens=4, min_tokens=5),
            Sampling(max_tokens=4, n=2, temperature=0.0),
            Sampling(max_tokens=4, json_schema={"type": "nonsense"}),
        ]
        for sampling in wrong:
            with raises(InputError):
                list(engine.generate(plan, sampling))
        assert scene.ask(plan).tokens

    def test_log_probabilities_of_injected_tokens_are_not_to_be_had(self, engine: Engine) -> None:
        scene = Scene(engine)
        memories = scene.memories(1)
        scene.encode_all(memories)
        with raises(InputError):
            list(engine.generate(scene.plan(memories), replace(GREEDY, prompt_logprobs=0)))

    def test_given_up_in_the_middle_the_engine_goes_on(self, engine: Engine) -> None:
        scene = Scene(engine)
        memories = scene.memories(2)
        scene.encode_all(memories)
        plan = scene.plan(memories)
        expected = scene.ask(plan)
        for _ in range(3):
            chunks = iter(engine.generate(plan, Sampling(max_tokens=100, temperature=0.0, ignore_eos=True)))
            assert next(chunks).report is None
            chunks.close()  # type: ignore[attr-defined]
        again = scene.ask(plan)
        assert again.tokens == expected.tokens
        assert again.report.facts_injected == 2
        assert scene.ask(plain(plan)).report.facts_injected == 0
