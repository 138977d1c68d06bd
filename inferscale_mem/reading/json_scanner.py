"""Where a JSON value ends, while its text is still coming."""

from __future__ import annotations


class JsonScanner:
    """Finds the end of one JSON value. What is inside is not checked.

    Args:
        depth: brackets that are open already; then the end is where they are all closed.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False
        self._scalar = False

    def end(self, text: str) -> int | None:
        """Take in the next characters; how many of them belong to the value, once it is complete, else None."""
        for at, character in enumerate(text):
            if self._in_string:
                if self._string_goes_on(character):
                    continue
                if self._depth == 0:
                    return at + 1
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                if self._depth == 0:
                    return at  # of what the value stands in
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
            elif self._depth == 0 and (character == "," or (character.isspace() and self._scalar)):
                return at
            elif not character.isspace():
                self._scalar = True
        return None

    def _string_goes_on(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return False
        return True
