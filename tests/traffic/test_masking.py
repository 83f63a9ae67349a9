"""What is masked, and above all what is not: numbers of a question must stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle.traffic.masking import iban_valid, luhn, mask

FAKE = "A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7r8"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("write to jo.doe+x@mail.example.co.uk, please", "write to [EMAIL], please"),
        ("Jürgen <jürgen@müller.de>", "Jürgen <[EMAIL]>"),
        ("mailto:a_b@c-d.org.", "mailto:[EMAIL]."),
        ("call me at +49 170 1234567 today", "call me at [PHONE] today"),
        ("tel. 030 1234567", "tel. [PHONE]"),
        ("Telefon: (030) 123-45 67", "Telefon: [PHONE]"),
        ("phone number is 020 7946 0958.", "phone number is [PHONE]."),
        ("(+1 (555) 123-4567)", "([PHONE])"),
        ("ring (415) 555-2671 or 415-555-2671", "ring [PHONE] or [PHONE]"),
        ("my card 4111 1111 1111 1111, cvv 123", "my card [CARD], cvv 123"),
        ("4111-1111-1111-1111 12/27", "[CARD] 12/27"),
        ("4242424242424242 123", "[CARD] 123"),
        ("amex=378282246310005", "amex=[CARD]"),
        ("IBAN DE89 3704 0044 0532 0130 00 BIC COBADEFF", "IBAN [IBAN] BIC COBADEFF"),
        ("ES91 2100 0418 4502 0005 1332 CALL ME", "[IBAN] CALL ME"),
        ("GB82WEST12345698765432", "[IBAN]"),
        (f"OPENAI sk-proj-{FAKE}", "OPENAI [KEY]"),
        (f"ghp_{FAKE} and hf_{FAKE[:34]}", "[KEY] and [KEY]"),
        ("AKIAIOSFODNN7EXAMPLE", "[KEY]"),
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N", "jwt [KEY]"),
        ('"password": "hunter2hunter2"', '"password": "[KEY]"'),
        ("API_KEY=abcd1234efgh", "API_KEY=[KEY]"),
        ("Authorization: Bearer abcdef0123456789", "Authorization: Bearer [KEY]"),
        ("https://x.test/?token=abc123def456&x=1", "https://x.test/?token=[KEY]&x=1"),
        ("postgres://bob:s3cr3t@db/x", "postgres://[PASSWORD]@db/x"),
        (f"-----BEGIN RSA PRIVATE KEY-----\n{FAKE}\n-----END RSA PRIVATE KEY----- end", "[PRIVATE KEY] end"),
        (f"-----BEGIN OPENSSH PRIVATE KEY-----\n{FAKE}\ncut", "[PRIVATE KEY]"),
    ],
)
def test_masked(text: str, masked: str) -> None:
    assert mask(text)[0] == masked


@pytest.mark.parametrize(
    "text",
    [
        "What is 4111111111111111 * 3?", "Compute 4111111111111111", "3 + 12345678901 = ?", "x = +12345678",
        "5 +12345678",
        "What is 555-200-1000?", "(2) +12345678901", "1e+1234567890",
        "pi is 3.14159265358979323846", "2^64 is 18446744073709551616",
        "The 16 digits 4111 1111 1111 1112 fail the check", "0000 0000 0000 0000", "1234567890123456", "ISBN 978-3-16-148410-0",
        "between 1990-2000 and 2010-2020", "192.168.100.200", "2024-11-30T10:14:42", "uuid 123e4567-e89b-12d3-a456-426614174000",
        "sha 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "y = A@B.reshape(3, 4)", "@app.route('/x')",
        "git clone git@github.com:org/repo.git", "user@localhost", "max_tokens: 12345abc", "password = input('Password: ')",
        "the password is required", "token = tokenizer1(text)", "from sk-learn-contrib-pipelines", "task-1234567890abcdefgh",
        "DE00 3704 0044 0532 0130 00", "BASE64 ABCD1234EFGH5678", "call 5 friends 3 times each", "The population is 1,234,567,890",
        "the phone costs 1234 dollars", "a hotel 1234567", "100000000000000 atoms", "Divide 987654321987654 by 7",
        "api_key=os.environ['K3Y']", "http://localhost:8000/v1",
    ],
)  # fmt: skip
def test_left_alone(text: str) -> None:
    assert mask(text) == (text, {})


def test_what_is_found_is_counted() -> None:
    assert mask("a@b.org c@d.org +49 170 1234567")[1] == {"EMAIL": 2, "PHONE": 1}


@given(st.text(max_size=300))
def test_masking_twice_changes_nothing_more(text: str) -> None:
    once = mask(text)[0]
    assert mask(once)[0] == once


@given(st.integers(0, 10**15 - 1))
def test_luhn_finds_a_changed_digit(number: int) -> None:
    body = f"{number:015d}"
    digit = next(d for d in "0123456789" if luhn(body + d))
    assert sum(luhn(body + d) for d in "0123456789") == 1
    changed = str((int(body[3]) + 1) % 10)
    assert not luhn(body[:3] + changed + body[4:] + digit)


@given(st.integers(min_value=0, max_value=10**6).map(lambda a: f"What is {a} + {a + 1} - {2 * a}?"))
def test_sums_stay(text: str) -> None:
    assert mask(text)[0] == text


def test_iban_checks_length_and_remainder() -> None:
    assert iban_valid("NO9386011117947")
    assert not iban_valid("NO9386011117948")
    assert not iban_valid("NO93860111179470")


@pytest.mark.timeout(120)  # quadratic patterns take hours here
@pytest.mark.parametrize("piece", ["a.", "a@", "1 ", "+1", "eyJ", "-----BEGIN PRIVATE KEY-----", "://a:", "token is ", "1-"])
def test_a_hostile_text_ends(piece: str) -> None:
    text = (piece * 100000)[:200000]
    assert mask(text)
