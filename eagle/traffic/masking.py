"""Masks what identifies people or opens doors, and leaves alone what only looks like it.

Careful patterns rather than a model: every rule has a check of its own (Luhn's for payment cards, mod 97 for IBANs, a
vendor's prefix for keys, an international or North American form, or a word such as "phone", for telephone numbers),
because a number in a maths question must stay what it is. What no rule knows (names, addresses, a key without a known
form) is not found: masking lowers the risk, it does not make a log anonymous.

Every pattern is anchored at a rare character or a bounded run, so the time is linear in the text's length.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

_OPERATORS = "*×÷^%+=<>"
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:(?!-----BEGIN)[\s\S]){0,20000}?(?:-----END [A-Z0-9 ]{0,40}-----|\Z)"
)
_KEY = re.compile(
    r"(?<![A-Za-z0-9_])(?:"
    r"sk-[A-Za-z0-9_-]{16,200}|(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,200}"  # OpenAI, Anthropic and others; Stripe
    r"|gh[pousr]_[A-Za-z0-9]{30,255}|github_pat_[A-Za-z0-9_]{22,255}|glpat-[A-Za-z0-9_-]{20,64}"  # GitHub, GitLab
    r"|hf_[A-Za-z0-9]{30,64}|npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{50,255}"  # Hugging Face, npm, PyPI
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,400}"  # AWS, Google
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,255}|SG\.[A-Za-z0-9_-]{16,64}\.[A-Za-z0-9_-]{16,64}"  # Slack, SendGrid
    r"|eyJ[A-Za-z0-9_-]{10,2000}\.[A-Za-z0-9_-]{10,4000}\.[A-Za-z0-9_-]{10,1000}"  # JSON Web Tokens
    r")(?![A-Za-z0-9_])"
)
# name = value, "name": "value", Authorization: Bearer value, ?token=value. The value is judged by _secret_value.
_NAMED = re.compile(
    r"(?i)(?P<name>(?<![a-z])(?:api[_ -]?keys?|access[_ -]?keys?(?:[_ -]?id)?"
    r"|secret(?:[_ -]?(?:access[_ -]?)?key)?|client[_ -]?secret|auth[_ -]?token"
    r"|access[_ -]?token|refresh[_ -]?token|token|passw(?:or)?d|pwd|bearer)"
    r"[\"']?(?:\s{0,3}(?:[:=]|\bis\b)\s{0,3}(?:bearer\s{1,3})?|(?<=bearer)\s{1,3})[\"']?)"
    r"(?P<value>[A-Za-z0-9+/_.~!@#$%-]{8,512}={0,2})"
)
_URL_PASSWORD = re.compile(r"(?<=://)[^\s:/@]{1,64}:[^\s/@]{1,128}(?=@)")
_EMAIL = re.compile(
    r"(?<![\w.%+-])(?!git@)[\w.%+-]{1,64}@(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}[^\W\d_]{2,24}(?![\w(-])"
)  # not x@y.f(...): a matrix product
_IBAN = re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]){11,30}(?![a-z])")
_CARD = re.compile(r"(?<![\w.,])[0-9](?:[ -]?[0-9]){13,22}(?!\w|[.,][0-9])")
_ISSUERS = re.compile(
    r"4[0-9]{15}(?:[0-9]{3})?|(?:5[1-5][0-9]{2}|222[1-9]|22[3-9][0-9]|2[3-6][0-9]{2}|27[01][0-9]|2720)[0-9]{12}"  # Visa, Mastercard
    r"|3[47][0-9]{13}|3(?:0[0-5]|[68][0-9])[0-9]{11}|6(?:011|5[0-9]{2}|4[4-9][0-9])[0-9]{12}|35[0-9]{14}|62[0-9]{14,17}"
)
_PLUS_PHONE = re.compile(r"(?<![\w)\]}.+])\+[1-9](?:[ ./()-]{0,2}[0-9]){7,14}(?!\w|[.,][0-9])")
_US_PHONE = re.compile(
    r"(?<![\w+.,-])(?:1[ .-])?(?:\([2-9][0-9]{2}\) ?|[2-9][0-9]{2}[.-])[2-9][0-9]{2}[.-][0-9]{4}(?![\w-]|[.,][0-9])"
)
_NAMED_PHONE = re.compile(
    r"(?i)(?P<name>(?<![^\W_])(?:tele(?:ph|f)one?|telefoon|téléphone|tel|(?:cell ?|mobile ?|tele)?phone|mobile|fax|whats ?app|sms"
    r"|(?:call|ring|text|phone) (?:me|us))(?: ?(?:no|nr|number|nummer))?\.?(?: ?(?:is|at|on|under))?[ :=#]{1,3})"
    r"(?P<value>\(?[0-9](?:[ ./()-]{0,2}[0-9]){6,14})(?!\w|[.,][0-9])"
)
_ARITHMETIC = re.compile(r"(?i)(?:what is|what's|compute|calculate|evaluate|solve|simplify|subtract|result of)[ :$(]{1,3}$")

IBAN_LENGTHS = {
    "AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22, "BI": 27, "BR": 29,
    "BY": 28, "CH": 21, "CR": 22, "CY": 28, "CZ": 24, "DE": 22, "DJ": 27, "DK": 18, "DO": 28, "EE": 20, "EG": 29,
    "ES": 24, "FI": 18, "FK": 18, "FO": 18, "FR": 27, "GB": 22, "GE": 22, "GI": 23, "GL": 18, "GR": 27, "GT": 28,
    "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26, "IT": 27, "JO": 30, "KW": 30, "KZ": 20, "LB": 28,
    "LC": 32, "LI": 21, "LT": 20, "LU": 20, "LV": 21, "LY": 25, "MC": 27, "MD": 24, "ME": 22, "MK": 19, "MN": 20,
    "MR": 27, "MT": 31, "MU": 30, "NI": 28, "NL": 18, "NO": 15, "OM": 23, "PK": 24, "PL": 28, "PS": 29, "PT": 25,
    "QA": 29, "RO": 24, "RS": 22, "RU": 33, "SA": 24, "SC": 31, "SD": 18, "SE": 24, "SI": 19, "SK": 24, "SM": 27,
    "SO": 23, "ST": 25, "SV": 28, "TL": 23, "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24, "XK": 20,
}  # fmt: skip


def mask(text: str) -> tuple[str, Counter[str]]:
    """Return the text with what was found replaced by [EMAIL], [KEY] and so on, and how often each kind was."""
    found: Counter[str] = Counter()
    for rule in _RULES:
        text = rule.apply(text, found)
    return text, found


@dataclass(frozen=True)
class _Rule:
    """A pattern, and how many characters of a match are masked (0: none) by `kind`. A group `name` in front stays."""

    kind: str
    pattern: re.Pattern[str]
    covers: Callable[[re.Match[str]], int]
    hint: str = ""  # text without which the pattern cannot match: a quick way out

    def apply(self, text: str, found: Counter[str]) -> str:
        if self.hint and self.hint not in text:
            return text

        def replace(match: re.Match[str]) -> str:
            size = self.covers(match)
            if not size:
                return match[0]
            found[self.kind] += 1
            return f"{match.groupdict().get('name') or ''}[{self.kind}]{match[0][size:]}"

        return self.pattern.sub(replace, text)


def luhn(digits: str) -> bool:
    """Tell whether a string of decimal digits has a valid Luhn check digit (ISO/IEC 7812-1)."""
    doubled = (sum(divmod(2 * int(d), 10)) for d in digits[-2::-2])
    return (sum(doubled) + sum(int(d) for d in digits[::-2])) % 10 == 0


def iban_valid(text: str) -> bool:
    """Tell whether a text without blanks is an IBAN: its country's length and the check mod 97 (ISO 13616, ISO 7064)."""
    if IBAN_LENGTHS.get(text[:2]) != len(text):
        return False
    return int("".join(str(int(c, 36)) for c in text[4:] + text[:4])) % 97 == 1


def _whole(match: re.Match[str]) -> int:
    return len(match[0])


def _digits(text: str) -> str:
    return "".join(c for c in text if c.isdigit())


def _key(match: re.Match[str]) -> int:
    return len(match[0]) if any(c.isdigit() for c in match[0]) else 0  # sk-learn-... is a name


def _in_formula(match: re.Match[str], end: int) -> bool:
    """Tell whether the match, up to `end`, is part of arithmetic: an operator beside it, or a term before its sign."""
    before, after = match.string[: match.start()][-30:], match.string[end : end + 3].lstrip(" ")
    near = before.rstrip(" ")[-1:]
    if after[:1] and after[0] in _OPERATORS or _ARITHMETIC.search(before):
        return True
    if match[0].startswith("+"):
        return bool(near) and (near.isdigit() or near in f"){_OPERATORS}")
    return bool(near) and near in _OPERATORS.replace("=", "")


def _card(match: re.Match[str]) -> int:
    """A card number may be followed by its security code or a date: the longest beginning that is one counts."""
    ends = [at for at in range(len(match[0]), 0, -1) if at == len(match[0]) or not match[0][at].isdigit()]
    for end in ends:
        digits = _digits(match[0][:end])
        if _ISSUERS.fullmatch(digits) and luhn(digits):
            return 0 if _in_formula(match, match.start() + end) else len(match[0][:end].rstrip(" -"))
    return 0


def _iban(match: re.Match[str]) -> int:
    """The country says how long an IBAN is; what follows in capitals is not of it."""
    left, end = IBAN_LENGTHS.get(match[0][:2], 0), 0
    while left and end < len(match[0]):
        left -= match[0][end] != " "
        end += 1
    ends_there = match.string[match.start() + end : match.start() + end + 1]
    return end if not left and not ends_there.isalnum() and iban_valid(match[0][:end].replace(" ", "")) else 0


def _phone(match: re.Match[str]) -> int:
    return 0 if _in_formula(match, match.end()) else len(match[0])


def _named_phone(match: re.Match[str]) -> int:
    return len(match[0]) if 7 <= len(_digits(match["value"])) <= 15 else 0


def _secret_value(match: re.Match[str]) -> int:
    """The value of a named secret must look like one: letters and digits, and no call, path or look-up."""
    value = match["value"]
    following = match.string[match.end() : match.end() + 1]
    mixed = any(c.isdigit() for c in value) and any(c.isalpha() for c in value)
    plain = following not in ("(", "[", "{") and not value.startswith(("/", ".", "$", "process.env", "os.environ"))
    return len(match[0]) if mixed and plain else 0


_RULES = (
    _Rule("PRIVATE KEY", _PRIVATE_KEY, _whole, "-----BEGIN"),
    _Rule("KEY", _KEY, _key),
    _Rule("PASSWORD", _URL_PASSWORD, _whole, "://"),
    _Rule("KEY", _NAMED, _secret_value),
    _Rule("EMAIL", _EMAIL, _whole, "@"),
    _Rule("IBAN", _IBAN, _iban),
    _Rule("CARD", _CARD, _card),
    _Rule("PHONE", _PLUS_PHONE, _phone, "+"),
    _Rule("PHONE", _US_PHONE, _phone),
    _Rule("PHONE", _NAMED_PHONE, _named_phone),
)
