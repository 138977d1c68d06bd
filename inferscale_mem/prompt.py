"""From chat messages and facts to the exact tokens of a prompt: header, memory block, the rest.

Header, each fact and the rest are tokenised apart, so that a fact has the same tokens in every prompt. Header and rest
are the chat template's text around a mark that stands at the memory block's place; each fact is one line, ``- text``,
in which the spelling of a special token is just characters.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from inferscale_mem import placing
from inferscale_mem.chat_template import ChatTemplate, as_chat, new_mark
from inferscale_mem.errors import PromptTooLongError
from inferscale_mem.handles import split
from inferscale_mem.placing import DEFAULT_SYSTEM as DEFAULT_SYSTEM
from inferscale_mem.placing import HEADING as HEADING
from inferscale_mem.protocols import ChatTokenizer
from inferscale_mem.reading import Reading, opened_by
from inferscale_mem.tool_template import CallStart, Tools
from inferscale_mem.types import Fact, Messages, Miss, PromptPlan, Scope, Segment

ANY_TOOL = ""
"""Stands for whichever tool the model chooses, where a tool's name is asked for."""

Position = Literal["system", "latest"]
"""Where the memory block stands: in the system message, or right before the latest human message."""

REPEATED = "says the same, word for word, as another memory of this request"

CACHED_FACTS = 16384
CACHED_HEADERS = 1024


class PromptPlanner:
    """Makes prompt plans for one model. Thread-safe.

    Args:
        tokenizer: the model's; its chat template is not asked before the first plan.
        fingerprint: changes with whatever changes records: engine, model, encoding policy.
    """

    def __init__(self, tokenizer: ChatTokenizer, fingerprint: str) -> None:
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._template = ChatTemplate(tokenizer)
        self._fact_tokens = lru_cache(CACHED_FACTS)(self._tokenise_fact)
        self._header = lru_cache(CACHED_HEADERS)(self._make_header)

    # Facts.

    def fact_tokens(self, text: str) -> tuple[int, ...]:
        """Tokens of the line ``- text`` and its line break, the same in every prompt."""
        return self._fact_tokens(text)

    def record_id(self, handle: str) -> str:
        """Id of the record that holds a fact's KV: ``<handle id>.<fingerprint>``.

        Raises:
            HandleError: not a handle.
        """
        return f"{split(handle)[0]}.{self._fingerprint}"

    def fact_segment(self, text: str, handle: str, *, record: bool = True, asked: str | None = None) -> Segment:
        """A fact's segment; without ``record`` it is left to prefill. ``asked``: see Segment."""
        return Segment("fact", self.fact_tokens(text), self.record_id(handle) if record else None, handle, asked)

    def _tokenise_fact(self, text: str) -> tuple[int, ...]:
        line = " ".join(stripped for part in text.splitlines() if (stripped := part.strip()))
        return tuple(self._tokenizer.encode(f"- {line}\n", literal=True))

    # Prompts.

    def handles_in(self, messages: Messages, roles: Sequence[str] = placing.SYSTEM) -> list[str]:
        """Handles in system messages (or those of other roles, too), good or bad, in order, each once.

        Raises:
            InputError: no messages, or content that is not text.
        """
        return list(dict.fromkeys(placing.handles_of(as_chat(messages), roles)))

    def other_handles_in(
        self, messages: Messages, roles: Sequence[str] = placing.SYSTEM, tools: Tools | None = None
    ) -> list[str]:
        """All other handles, wherever in messages and tools they stand, each once.

        Raises:
            InputError: no messages, or content that is not text.
        """
        chat = as_chat(messages)
        asking = set(placing.handles_of(chat, roles))
        anywhere = dict.fromkeys([*placing.handles_anywhere(chat), *placing.handles_of_tools(tools)])
        return [handle for handle in anywhere if handle not in asking]

    def default_header(self) -> Segment:
        """The header of a request with memories and no system message: what facts are encoded behind.

        Raises:
            ChatTemplateError: the model has no usable chat template.
        """
        mark = new_mark()
        chat = placing.marked([{"role": "user", "content": "Hello"}], (), mark)
        before, _ = self._template.render_around(chat, mark)
        return self._header(before)

    def plan(
        self,
        messages: Messages,
        facts: Mapping[str, Fact],
        *,
        order: Sequence[str] | None = None,
        is_ready: Callable[[str], bool],
        scope: Scope | None,
        store: str,
        missed: Sequence[Miss] = (),
        lasting: Mapping[str, str] | None = None,
        text_tail: int = 0,
        free_tokens: int = 0,
        tools: Tools | None = None,
        call: str | None = None,
        position: Position = "system",
        roles: Sequence[str] = placing.SYSTEM,
        hide: Collection[str] = (),
    ) -> PromptPlan:
        """The prompt for these messages, with the facts in one block.

        The block stands where the first valid handle stands in a system message; otherwise at the end of the first
        system message, which is made if there is none. Valid handles are cut out of messages and tools. All others
        stay what they are, inert text, and are counted as missed.

        Args:
            messages: the conversation; content is text or a list of text blocks.
            facts: valid handles and what they stand for. All are served, once each, and nothing else. Of those that
                say the same word for word one is: records know nothing of each other, and repeats confuse the model.
            order: handles, most similar first; those it leaves out follow as they stand in the messages.
            is_ready: whether a record (by id) can be injected now. Others are served behind those that can.
            scope: whose facts may be shown.
            store: the store the handles belong to.
            missed: handles that are known not to be valid, and why.
            lasting: valid handle -> the fact's lasting one; None if all are that already.
            text_tail: leave so many facts at the end of the block to prefill.
            free_tokens: and as many as fit in so many tokens together with the text behind the block.
            tools: as chat templates take them.
            call: have the answer begin as a call of this tool, ANY_TOOL for any of them.
            position: "latest" puts the block right before the latest human message instead; the conversation in front
                of it is then in records, too.
            roles: of the messages whose handles ask for something.
            hide: further handles that are cut out of messages and tools, and not served.

        Raises:
            InputError: no messages, or content that is not text.
            ChatTemplateError: the model has no template, or it refuses these messages.
        """
        said = as_chat(messages)
        misses = placing.all_missed(said, facts, missed, order or (), roles, tools)
        start = CallStart.of(call or None) if call is not None else None
        hidden = {*facts, *hide}
        tools = placing.tools_without(tools, hidden)
        asked: dict[str, str] = {}  # lasting handle -> the one that asked first, most similar first
        for handle in [*(order or ()), *placing.handles_of(said, roles), *facts]:
            if handle in facts:
                asked.setdefault(lasting[handle] if lasting else handle, handle)
        served: dict[tuple[int, ...], tuple[str, str, str]] = {}  # by tokens: each line once, for the most similar
        for handle, by in asked.items():
            first = served.setdefault(self.fact_tokens(facts[by].text), (handle, by, facts[by].text))
            misses += (Miss(by, REPEATED),) if first[0] != handle else ()
        block = self._block(list(served.values()), is_ready)
        if position == "latest" and (marks := placing.human_marks(said)):
            chat, shown = self._template.tools.prepare(
                placing.before_humans(said, hidden, marks), tools, DEFAULT_SYSTEM
            )
            *history, behind = self._template.render_between(chat, list(marks.values()), tools=shown, start=start)
            headers = self._history(history, heading=bool(block))
            behind = f"\n{behind}" if block else behind
        elif facts:
            mark = new_mark()
            chat, shown = self._template.tools.prepare(placing.marked(said, hidden, mark), tools, DEFAULT_SYSTEM)
            before, behind = self._template.render_around(chat, mark, tools=shown, start=start)
            headers = [self._header(before)]
        else:
            chat, shown = self._template.tools.prepare(placing.without(said, hidden), tools, DEFAULT_SYSTEM)
            behind, headers = self._template.render(chat, tools=shown, start=start), []
        rest = self._text(behind)
        tail = max(text_tail, _fitting_tail(block, free_tokens - len(rest.token_ids)))
        segments = (*headers, *_left_to_prefill(block, tail), rest)
        reading = self._reading(behind, bool(tools), call)
        if not facts:
            scope, store = None, ""
        return PromptPlan(tuple(s for s in segments if s.token_ids), scope, store, misses, reading)

    def _history(self, parts: Sequence[str], heading: bool) -> list[Segment]:
        """The conversation up to the latest human message, cut where each human message begins.

        Each part has a record of its own, on top of those in front of it, so that the next turn finds them all.
        """
        headers: list[Segment] = []
        chain = hashlib.sha256()
        for part in [*parts, *([HEADING] if heading else [])]:
            tokens = self._header(part).token_ids
            chain.update(json.dumps(tokens).encode("ascii"))
            if tokens:
                headers.append(Segment("header", tokens, f"header.{chain.hexdigest()[:32]}"))
        return headers

    def _reading(self, text: str, with_tools: bool, call: str | None) -> Reading:
        """How an answer is to be read whose prompt ends with this text."""
        if not with_tools:
            return Reading(reasoning_end=opened_by(text))
        traits = self._template.tools.traits
        if call is None:
            return Reading(traits.form, reasoning_end=opened_by(text))
        return Reading(traits.form, call_of=call or None, in_call=call == ANY_TOOL, key=traits.key)

    def _block(self, similar_first: Sequence[tuple[str, str, str]], is_ready: Callable[[str], bool]) -> list[Segment]:
        """Segments of facts, given as (lasting handle, the one that asked, text).

        Most similar last, but those without a record at hand behind all others.
        """
        segments = [
            self.fact_segment(text, handle, asked=by if by != handle else None)
            for handle, by, text in reversed(similar_first)
        ]
        return ready_in_front(segments, is_ready)

    def _make_header(self, text: str) -> Segment:
        tokens = tuple(self._tokenizer.encode(text, literal=False))
        digest = hashlib.sha256(",".join(map(str, tokens)).encode("ascii")).hexdigest()
        return Segment("header", tokens, f"header.{digest[:32]}")

    def _text(self, text: str) -> Segment:
        return Segment("text", tuple(self._tokenizer.encode(text, literal=False)))


def _fitting_tail(block: Sequence[Segment], room: int) -> int:
    """How many facts at the end of a block fit in so many tokens."""
    sums = itertools.accumulate(len(segment.token_ids) for segment in reversed(block))
    return sum(1 for _ in itertools.takewhile(lambda length: length <= room, sums))


def _left_to_prefill(block: Sequence[Segment], tail: int) -> list[Segment]:
    """The block with so many facts at its end without a record."""
    injected = max(0, len(block) - tail)
    return [*block[:injected], *(replace(segment, record=None) for segment in block[injected:])]


def ready_in_front(segments: Iterable[Segment], is_ready: Callable[[str], bool]) -> list[Segment]:
    """The segments with those whose record is not ready behind the others: a gap would cost all that follow it."""
    ready: list[Segment] = []
    rest: list[Segment] = []
    for segment in segments:
        (ready if segment.record is not None and is_ready(segment.record) else rest).append(segment)
    return ready + rest


def check_length(plan: PromptPlan, max_model_len: int, max_tokens: int | None) -> None:
    """Whether prompt and answer fit the model.

    Args:
        max_model_len: tokens of prompt and answer together.
        max_tokens: of the answer; None: as many as fit, at least one.

    Raises:
        PromptTooLongError: they do not.
    """
    prompt, answer = len(plan.token_ids), 1 if max_tokens is None else max_tokens
    if prompt + answer <= max_model_len:
        return
    memories = sum(len(fact.token_ids) for fact in plan.facts)
    raise PromptTooLongError(
        f"The prompt has {prompt} tokens ({memories} of {len(plan.facts)} memories, {prompt - memories} of messages) "
        f"and the answer may have {answer}: {prompt + answer} together; the model takes {max_model_len}. Send fewer "
        "memories or messages, or lower max_tokens."
    )
