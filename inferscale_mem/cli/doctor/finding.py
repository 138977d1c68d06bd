"""What one check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        name: what was looked at.
        status: "ok"; "warn" for what works but is not as it should be; "fail" for what is needed and does not work.
        detail: what was found.
        advice: what to do; "" if nothing.
    """

    name: str
    status: Status
    detail: str
    advice: str = ""
