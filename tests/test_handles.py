from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscale_mem.errors import ConfigError, HandleError
from inferscale_mem.handles import ALPHABET, HandleSigner, find, may_name, split, strip, verify_tag
from inferscale_mem.types import Fact, Scope

KEY = bytes(range(32))
SIGNER = HandleSigner(KEY, "memories")
ALICE = Scope(user_id="alice")
FACT = Fact("fact-1", "likes tea", ALICE, "revision-1")
HANDLE = SIGNER.mint(FACT)

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
def test_found_beside(around: str) -> None:
    text = around.replace("{}", HANDLE)
    (found,) = find(text)
    assert found.handle == HANDLE == text[found.start : found.end]


@pytest.mark.parametrize("around", ["x{}", "{}x", "1{}", "{}0", "my_{}", "{}_old", "pr{}", "{}{}", "n{}"])
def test_not_found_inside_longer_words(around: str) -> None:
    assert find(around.replace("{}", HANDLE)) == []


def test_found_in_order_good_and_bad() -> None:
    bad = f"ism1.{'0' * 16}.{'0' * 16}"
    assert [f.handle for f in find(f"- {bad}\n- {HANDLE}\n- {bad}, {HANDLE[:-1]}")] == [bad, HANDLE, bad]


@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
def test_strip_leaves_no_handle(before: str, after: str) -> None:
    assert find(strip(f"{before} {HANDLE}\n- {HANDLE} {after}")) == []


def test_strip() -> None:
    assert strip("no handles\n- here") == "no handles\n- here"
    assert strip(f"You are kind. Memories:\n- {HANDLE}\n- {HANDLE}\nBe brief.") == "You are kind. Memories:\nBe brief."
    assert strip(f"Was {HANDLE} right?") == "Was right?"
    assert strip(f"1. {HANDLE}\n2. {HANDLE}") == ""


def test_a_records_name_is_bound_to_its_handle() -> None:
    handle = "ism1.0123456789abcdef.0123456789abcdef"
    assert may_name("0123456789abcdef.policy", handle)
    assert not may_name("1123456789abcdef.policy", handle)
    assert not may_name("header.1", handle)
    assert not may_name("0123456789abcdef", "no handle")
    assert may_name("header.0123456789abcdef", None) and may_name("self-test.fact", None)
    assert not may_name("0123456789abcdef.policy", None)
