"""What the values of `format` mean, for the tests of structured output: by what JSON Schema refers to.

jsonschema checks a format only where a package for it is installed, and passes all others. Two things are as
`docs/structured-output.md` says that they are: 29 February is a day of every year, and any minute may have a
second 60.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from uuid import UUID

import jsonschema

_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_DATE = re.compile(r"\d{4}-(\d\d)-(\d\d)", re.ASCII)
_TIME = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:[zZ]|[+-](\d\d):(\d\d))", re.ASCII)
_DAY_TIME = r"T(?=\d)(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_DAY_DATE = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"
_DURATION = re.compile(rf"P(?:\d+W|{_DAY_DATE}(?:{_DAY_TIME})?|{_DAY_TIME})", re.ASCII)
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LOCAL = re.compile(rf'{_ATOM}(?:\.{_ATOM})*|"(?:[ !#-\[\]-~]|\\[ -~])*"')
_URI = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]*:(?:[A-Za-z0-9._~:/?@!$&'()*+,;=-]|%[0-9A-Fa-f]{2}|\[[0-9A-Fa-fv:.]+\])*"
    r"(?:#(?:[A-Za-z0-9._~:/?@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)?"
)


def _is_date(text: str) -> bool:
    """RFC 3339, full-date."""
    found = _DATE.fullmatch(text)
    return found is not None and 1 <= int(found[1]) <= 12 and 1 <= int(found[2]) <= _DAYS[int(found[1]) - 1]


def _is_time(text: str) -> bool:
    """RFC 3339, full-time."""
    found = _TIME.fullmatch(text)
    if found is None:
        return False
    numbers = [int(part or 0) for part in found.groups()]
    return all(number <= most for number, most in zip(numbers, (23, 59, 60, 23, 59), strict=True))


def _is_date_time(text: str) -> bool:
    """RFC 3339, date-time."""
    return text[10:11] in ("T", "t") and _is_date(text[:10]) and _is_time(text[11:])


def _is_email(text: str) -> bool:
    """RFC 5321, Mailbox."""
    local, _, domain = text.rpartition("@")
    if domain.startswith("[") and domain.endswith("]"):
        domain = "literal"
    return _LOCAL.fullmatch(local) is not None and _HOST.fullmatch(domain) is not None


def _is_address(kind: type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address]) -> Callable[[str], bool]:
    def is_one(text: str) -> bool:
        try:
            kind(text)
        except ValueError:
            return False
        return "%" not in text

    return is_one


def _is_uuid(text: str) -> bool:
    """RFC 4122: with its four hyphens."""
    try:
        return str(UUID(text)) == text.lower()
    except ValueError:
        return False


def _matches(pattern: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda text: pattern.fullmatch(text) is not None


FORMATS: dict[str, Callable[[str], bool]] = {
    "date-time": _is_date_time,
    "date": _is_date,
    "time": _is_time,
    "duration": _matches(_DURATION),  # RFC 3339, appendix A
    "email": _is_email,
    "hostname": _matches(_HOST),  # RFC 1123, section 2.1
    "ipv4": _is_address(ipaddress.IPv4Address),
    "ipv6": _is_address(ipaddress.IPv6Address),
    "uri": _matches(_URI),  # RFC 3986, a scheme and the characters behind it
    "uuid": _is_uuid,
}


def _checker() -> jsonschema.FormatChecker:
    made = jsonschema.FormatChecker(formats=())
    for name, is_one in FORMATS.items():
        made.checks(name)(lambda value, is_one=is_one: not isinstance(value, str) or is_one(value))
    return made


CHECKER = _checker()
