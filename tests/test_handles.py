from __future__ import annotations

import dataclasses
import hashlib
import hmac
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscale_mem.errors import ConfigError, HandleError
from inferscale_mem.handles import (
    ALPHABET,
    ENDLESS,
    EXPIRED,
    UNKNOWN,
    HandleSigner,
    check_lasting,
    find,
    find_broken,
    may_name,
    split,
    strip,
    verify_tag,
)
from inferscale_mem.types import Fact, Scope

KEY = bytes(range(32))
SIGNER = HandleSigner(KEY, "memories")
ALICE = Scope(user_id="alice")
FACT = Fact("fact-1", "likes tea", ALICE, "revision-1")
HANDLE = SIGNER.mint(FACT)
NOW = 1_800_000_000
STRICT = HandleSigner(KEY, "memories", 60, lambda: NOW - 0.5)
EXPIRING = STRICT.issue(FACT)

texts = st.text(min_size=1, max_size=20)
scopes = st.builds(
    Scope, user_id=st.text('ab",:{}', min_size=1, max_size=6), agent_id=st.none() | st.text('ab",:', min_size=1)
)


def test_form() -> None:
    prefix, identity, tag = HANDLE.split(".")
    assert prefix == "ism1"
    assert len(identity) == len(tag) == 16
    assert set(identity + tag) <= set(ALPHABET)
    assert not set("ilou") & set(ALPHABET)
    assert split(HANDLE) == (identity, tag)
    assert SIGNER.handle_id(FACT) == identity
    assert SIGNER.issue(FACT) == HANDLE and not SIGNER.strict


def test_form_of_one_that_expires() -> None:
    prefix, identity, expiry, tag = EXPIRING.split(".")
    assert (prefix, identity, expiry) == ("ism1", SIGNER.handle_id(FACT), "1800000060")
    assert len(tag) == 16 and set(tag) <= set(ALPHABET) and tag != split(HANDLE)[1]
    assert STRICT.strict and STRICT.mint(FACT) == HANDLE, "its lasting form is the same everywhere"
    assert split(EXPIRING) == (identity, tag)


def test_bits_are_those_of_the_digests() -> None:
    """Other programs may check handles: the bytes that are hashed are part of the format."""
    identity, tag = split(HANDLE)

    def bits(digits: str) -> int:
        number = 0
        for digit in digits:
            number = number * 32 + ALPHABET.index(digit)
        return number

    digest = hashlib.sha256(b'["fact-1", "revision-1"]').digest()
    signed = json.dumps(["ism1", "memories", ALICE.key, identity]).encode()
    assert bits(identity) == int.from_bytes(digest[:10], "big")
    assert bits(tag) == int.from_bytes(hmac.digest(KEY, signed, "sha256")[:10], "big")
    signed = json.dumps(["ism1", "memories", ALICE.key, identity, "1800000060"]).encode()
    assert bits(split(EXPIRING)[1]) == int.from_bytes(hmac.digest(KEY, signed, "sha256")[:10], "big")


def test_verifies_only_what_it_minted() -> None:
    other_identity = SIGNER.handle_id(dataclasses.replace(FACT, revision="revision-2"))
    identity, tag = split(HANDLE)
    assert SIGNER.verify(HANDLE, ALICE)
    assert verify_tag(KEY, HANDLE, "memories", ALICE)
    assert not SIGNER.verify(HANDLE, Scope(user_id="bob"))
    assert not SIGNER.verify(HANDLE, Scope(agent_id="alice"))
    assert not SIGNER.verify(HANDLE, Scope(user_id="alice", run_id="1"))
    assert not verify_tag(KEY, HANDLE, "other store", ALICE)
    assert not verify_tag(KEY[::-1], HANDLE, "memories", ALICE)
    assert not SIGNER.verify(f"ism1.{other_identity}.{tag}", ALICE)
    for bad in ("", identity, HANDLE + "0", HANDLE[:-1], HANDLE.upper(), f"ism2{HANDLE[4:]}", f" {HANDLE}", "ism1.é.é"):
        assert not SIGNER.verify(bad, ALICE)


def at(now: float, strict: bool = True) -> HandleSigner:
    return HandleSigner(KEY, "memories", 60 if strict else None, lambda: now)


@pytest.mark.parametrize("strict", [True, False])
def test_an_expiring_handle_is_good_until_its_second(strict: bool) -> None:
    assert at(NOW + 59.9, strict).refusal(EXPIRING, ALICE) is None and at(NOW + 59.9, strict).verify(EXPIRING, ALICE)
    assert at(NOW + 60, strict).refusal(EXPIRING, ALICE) == EXPIRED
    assert at(NOW + 60, strict).refusal(EXPIRING, Scope(user_id="bob")) == UNKNOWN
    assert not at(NOW + 60, strict).verify(EXPIRING, ALICE)


def test_strict_mode_refuses_lasting_handles_and_says_so_of_genuine_ones_only() -> None:
    assert STRICT.refusal(HANDLE, ALICE) == ENDLESS and SIGNER.refusal(HANDLE, ALICE) is None
    assert STRICT.refusal(HANDLE, Scope(user_id="bob")) == UNKNOWN


@pytest.mark.parametrize("position", [n for n, character in enumerate(EXPIRING) if n > 4 and character != "."])
def test_nothing_of_an_expiring_handle_can_be_changed(position: int) -> None:
    for other in {"0", "9", "1"} - {EXPIRING[position]}:
        assert STRICT.refusal(EXPIRING[:position] + other + EXPIRING[position + 1 :], ALICE) == UNKNOWN


def test_neither_form_can_be_made_of_the_other() -> None:
    _, identity, expiry, tag = EXPIRING.split(".")
    for made in (f"ism1.{identity}.{tag}", f"ism1.{identity}.{expiry}.{split(HANDLE)[1]}", f"{HANDLE}.{expiry}"):
        for signer in (STRICT, SIGNER):
            assert signer.refusal(made, ALICE) == UNKNOWN
    arabic = "".join(chr(0x660 + int(digit)) for digit in expiry)
    for digits in (expiry[:-1], expiry + "0", f"+{expiry[1:]}", arabic):
        assert find(f"ism1.{identity}.{digits}.{tag}") == []


def test_no_record_is_named_after_an_expiring_handle() -> None:
    assert not verify_tag(KEY, EXPIRING, "memories", ALICE)
    assert not may_name(f"{split(EXPIRING)[0]}.policy", EXPIRING)
    check_lasting(HANDLE)
    with pytest.raises(HandleError, match="names no record"):
        check_lasting(EXPIRING)


@pytest.mark.parametrize("position", range(22, 38))
def test_a_changed_tag_is_forged(position: int) -> None:
    other = "0" if HANDLE[position] != "0" else "1"
    assert not SIGNER.verify(HANDLE[:position] + other + HANDLE[position + 1 :], ALICE)


@given(texts, texts, texts, texts, scopes, scopes)
def test_no_two_facts_share_a_handle(a: str, b: str, c: str, d: str, one: Scope, other: Scope) -> None:
    first, second = Fact(a, "", one, b), Fact(c, "", other, d)
    same = (a, b, one) == (c, d, other)
    assert (SIGNER.mint(first) == SIGNER.mint(second)) == same


def test_text_and_metadata_do_not_change_the_handle_but_the_revision_does() -> None:
    assert SIGNER.mint(dataclasses.replace(FACT, text="x", metadata={"a": 1})) == HANDLE
    assert SIGNER.mint(dataclasses.replace(FACT, revision="revision-2")) != HANDLE


def test_signer_refuses_short_keys_and_nameless_stores() -> None:
    with pytest.raises(ConfigError, match="16"):
        HandleSigner(bytes(15), "memories")
    with pytest.raises(ConfigError, match="name"):
        HandleSigner(KEY, "")


@pytest.mark.parametrize("bad", ["", "ism1", HANDLE[:-1], HANDLE + "a", f"{HANDLE}\n", HANDLE.replace(".", "-")])
def test_split_refuses_other_forms(bad: str) -> None:
    with pytest.raises(HandleError, match=r"ism1\.<16 characters>"):
        split(bad)


@pytest.mark.parametrize(
    "around",
    [
        "{}", "- {}", "({})", "<{}>", "**{}**", "_{}_", "__{}__", "`{}`", '"{}"', "'{}'", "<li>{}</li>", "[{}](x)",
        "{},", "{}.", "{}. Next", "{}!", "a: {}; b", "|{}|", "&quot;{}&quot;", "x={}&y", "/{}/", "记住{}。", "\t{}\r\n",
        "#{}", "~~{}~~", '"a\\n{}\\nb"', "\\u003c{}\\u003e", "\N{ZERO WIDTH SPACE}{}", "-{}-", "…{}…",
    ],
)  # fmt: skip
@pytest.mark.parametrize("handle", [HANDLE, EXPIRING])
def test_found_beside(around: str, handle: str) -> None:
    text = around.replace("{}", handle)
    (found,) = find(text)
    assert found.handle == handle == text[found.start : found.end]


@pytest.mark.parametrize("around", ["x{}", "{}x", "1{}", "{}0", "my_{}", "{}_old", "pr{}", "n{}"])
@pytest.mark.parametrize("handle", [HANDLE, EXPIRING])
def test_not_found_inside_longer_words(around: str, handle: str) -> None:
    assert find(around.replace("{}", handle)) == []


@pytest.mark.parametrize("between", ["", "_"])
@pytest.mark.parametrize(("one", "two"), itertools.product([HANDLE, EXPIRING], repeat=2))
def test_found_glued_to_each_other(one: str, two: str, between: str) -> None:
    text = f"Memories: {one}{between}{two}{between}{one}."
    assert [found.handle for found in find(text)] == [one, two, one] and find_broken(text) == []
    assert find(strip(text)) == []
    assert find(f"{one}{between}{two}x") == find(one)  # the second is inside a longer word


def test_broken_handles_are_found_apart() -> None:
    cut = HANDLE[:-1]
    text = f"x{HANDLE} {HANDLE} {cut}, {HANDLE}a {HANDLE[:25]}\n{HANDLE[25:]}."
    assert find_broken(text) == [HANDLE, cut, f"{HANDLE}a", HANDLE[:25]]
    assert find_broken(f"see ism1.<id>.<tag>, ism1. and {HANDLE}") == []


def test_found_in_order_good_and_bad() -> None:
    bad = f"ism1.{'0' * 16}.{'0' * 16}"
    assert [f.handle for f in find(f"- {bad}\n- {HANDLE}\n- {bad}, {HANDLE[:-1]}")] == [bad, HANDLE, bad]
    assert [f.handle for f in find(f"{EXPIRING} {HANDLE}. {EXPIRING[:-1]} {EXPIRING}")] == [EXPIRING, HANDLE, EXPIRING]


@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
def test_strip_leaves_no_handle(before: str, after: str) -> None:
    assert find(strip(f"{before} {HANDLE}\n- {EXPIRING} {after}")) == []


def test_strip() -> None:
    assert strip("no handles\n- here") == "no handles\n- here"
    assert strip(f"You are kind. Memories:\n- {HANDLE}\n- {HANDLE}\nBe brief.") == "You are kind. Memories:\nBe brief."
    assert strip(f"Was {HANDLE} right?") == "Was right?"
    assert strip(f"1. {HANDLE}\n2. {HANDLE}") == ""
    assert strip(f"Be kind. Memories:\n- {EXPIRING}\n- {HANDLE}\nBe brief.") == "Be kind. Memories:\nBe brief."


def test_a_records_name_is_bound_to_its_handle() -> None:
    handle = "ism1.0123456789abcdef.0123456789abcdef"
    assert may_name("0123456789abcdef.policy", handle)
    assert not may_name("1123456789abcdef.policy", handle)
    assert not may_name("header.1", handle)
    assert not may_name("0123456789abcdef", "no handle")
    assert may_name("header.0123456789abcdef", None) and may_name("self-test.fact", None)
    assert not may_name("0123456789abcdef.policy", None)
