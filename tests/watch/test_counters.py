"""Scraping, differences across restarts, and the windows' figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle.bundle.reference import Reference, prompt_counts, read_reference, write_reference
from eagle.errors import BundleError, ConfigError
from eagle.watch.counts import Counts, between
from eagle.watch.figures import expected, lower_bounds, observed
from eagle.watch.scrape import EngineCounters, NoCounters, Unreachable, fetch, metrics_url, parse
from tests.watch.pages import FakeVllm, serving

ROOT = Path(__file__).parents[2]
NAMES = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")


def counters(drafts: int, *by_position: int, created: float = 0.0) -> EngineCounters:
    return EngineCounters(
        drafts=drafts, draft_tokens=drafts * len(by_position), accepted=sum(by_position), requests=drafts // 25,
        by_position=by_position, created=created,
    )


class TestScrape:
    def test_the_names_are_those_of_the_installed_vllm(self) -> None:
        sources = list((ROOT / ".venv-vllm").glob("lib/python3*/site-packages/vllm/v1/spec_decode/metrics.py"))
        if not sources:
            pytest.skip("no .venv-vllm here")
        text = sources[0].read_text(encoding="utf-8")
        for name in NAMES:
            assert f'"vllm:spec_decode_{name}"' in text
        assert 'name="vllm:request_success"' in (sources[0].parents[1] / "metrics" / "loggers.py").read_text(encoding="utf-8")
        assert re.search(r'pos_labelnames = labelnames \+ \["position"\]', text)

    def test_a_page_is_read_by_engine(self) -> None:
        fake = FakeVllm(engines=2)
        fake.work([5, 3, 1], 10, engine=1)
        found = parse(fake.page(), "here")
        assert sorted(found) == ["m/0", "m/1"]
        assert found["m/1"].model_copy(update={"created": 0.0}) == counters(10, 5, 3, 1)
        assert found["m/1"].created > 0

    @pytest.mark.parametrize("page", ["", "<html>x</html>", "vllm:other 1\n", "vllm:spec_decode_num_drafts_total x\n"])
    def test_a_page_without_counters(self, page: str) -> None:
        with pytest.raises(NoCounters, match=r"^watch: http://x has no vllm:spec|^watch: http://x: its speculation"):
            parse(page, "http://x")

    def test_a_counter_that_is_no_number(self) -> None:
        with pytest.raises(NoCounters, match="NaN|nan"):
            parse('vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} NaN\n', "u")

    @pytest.mark.parametrize(
        ("line", "word"),
        [
            ('vllm:spec_decode_num_drafts_total{engine="0"} -5', "-5"),
            ('vllm:spec_decode_num_drafts_total{engine="0"} 1e308', "1e"),
            ('vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="-1"} 1', "position -1"),
            ('vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1000000000"} 1', "position 1000000000"),
        ],
    )
    def test_a_counter_that_cannot_be(self, line: str, word: str) -> None:
        """A position of 10^9 once took all memory."""
        with pytest.raises(NoCounters, match=word):
            parse(f"{line}\n", "u")

    def test_unreachable_and_errors(self) -> None:
        with serving() as site:
            url = metrics_url(site.url)
            assert "num_drafts_total" in fetch(url, 5)
            site.status = 503
            with pytest.raises(Unreachable, match="503"):
                fetch(url, 5)
        with pytest.raises(Unreachable, match="not reachable"):
            fetch(url, 5)

    @pytest.mark.parametrize(
        ("given", "full"),
        [
            ("http://h:8000", "http://h:8000/metrics"), ("h:8000/", "http://h:8000/metrics"), ("http://h/v1", "http://h/metrics"),
            ("https://h/a/metrics", "https://h/a/metrics"),
        ],
    )  # fmt: skip
    def test_addresses(self, given: str, full: str) -> None:
        assert metrics_url(given) == full

    @pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port", "file:///etc/passwd"])
    def test_no_address(self, url: str) -> None:
        with pytest.raises(ConfigError, match="give the server's"):
            metrics_url(url)


class TestBetween:
    def test_plain_growth(self) -> None:
        assert between({"e": counters(10, 5, 2)}, {"e": counters(30, 15, 3)}) == (
            Counts(drafts=20, draft_tokens=40, requests=1, by_position=(10, 1)), [],
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("before", "now"),
        [
            (counters(100, 50, 20), counters(7, 3, 1)),
            (counters(100, 50, 20, created=1000.0), counters(300, 100, 30, created=2000.0)),  # overtook the old counts meanwhile
            (counters(100, 50, 20), counters(200, 60, 30, 10)),  # another K
            (counters(100, 10, 1), counters(110, 100, 90)),  # more accepted than drafted since: cannot be the same life
        ],
    )
    def test_a_restart_never_counts_backwards_or_twice(self, before: EngineCounters, now: EngineCounters) -> None:
        counted, restarted = between({"e": before}, {"e": now})
        assert restarted == ["e"]
        assert counted in (between({}, {"e": now})[0], Counts())

    def test_one_engine_restarts_the_other_goes_on(self) -> None:
        before = {"a": counters(10, 5), "b": counters(10, 5)}
        counted, restarted = between(before, {"a": counters(12, 6), "b": counters(3, 1), "c": counters(1, 1)})
        assert (counted.drafts, counted.by_position, restarted) == (2 + 3 + 1, (1 + 1 + 1,), ["b", "c"])

    @given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1), st.booleans()), max_size=30))
    def test_nothing_is_counted_twice_over_any_history(self, history: list[tuple[int, float, bool]]) -> None:
        """Lives follow each other, one reading after each piece of work; a start is marked on the page."""
        drafts = accepted = done = done_accepted = life = 0
        before = {"e": counters(0, 0, created=1000.0)}
        total = Counts()
        for work, share, restart in history:
            if restart:
                drafts, accepted, life = 0, 0, life + 1
            drafts, accepted = drafts + work, accepted + int(work * share)
            done, done_accepted = done + work, done_accepted + int(work * share)
            now = {"e": counters(drafts, accepted, created=1000.0 + 60 * life)}
            counted, _ = between(before, now)
            total, before = total + counted, now
        assert (total.drafts, sum(total.by_position)) == (done, done_accepted)


def reference(*shares: float, prompts: list[tuple[int, list[int]]] | None = None) -> Reference:
    rows = prompts or [(100, [round(100 * s) for s in shares])] * 8
    return Reference.model_validate(
        {
            "draft_tokens": len(shares), "temperature": 0.0, "vllm_version": "0", "acceptance_by_position": shares,
            "prompts": [{"kind": "x", "drafts": n, "by_position": by} for n, by in rows],
        }
    )  # fmt: skip


class TestFigures:
    def test_without_spread_the_bound_is_the_share(self) -> None:
        assert lower_bounds(reference(0.5, 0.2), 0.95) == pytest.approx((0.5, 0.2))

    def test_spread_between_prompts_lowers_the_bound_rounds_do_not_raise_it(self) -> None:
        few = lower_bounds(reference(0.5, prompts=[(10, [2]), (10, [8])] * 4), 0.95)
        many = lower_bounds(reference(0.5, prompts=[(1000, [200]), (1000, [800])] * 4), 0.95)
        assert few == pytest.approx(many)
        error = (8 / 7 * 8 * 3.0**2) ** 0.5 / 80
        assert few[0] == pytest.approx(0.5 - 1.8946 * error, abs=1e-4)

    def test_one_prompt_says_nothing(self) -> None:
        assert lower_bounds(reference(0.5, prompts=[(100, [50])]), 0.95) == (0.0,)

    def test_fixed_k_is_exact(self) -> None:
        window = Counts(drafts=100, draft_tokens=300, by_position=(50, 30, 10))
        assert observed(window, 3) == pytest.approx([0.5, 0.3, 0.1, 0.3])
        assert expected((0.5, 0.3, 0.1), window, 3) == pytest.approx([0.5, 0.3, 0.1, 0.3])

    def test_a_server_that_drafts_less_is_judged_on_what_it_drafts(self) -> None:
        window = Counts(drafts=100, draft_tokens=100, by_position=(50,))
        assert observed(window, 3) == pytest.approx([0.5, 0, 0, 0.5 / 3])
        assert expected((0.5, 0.3, 0.1), window, 3) == pytest.approx([0.5, 0, 0, 0.5 / 3])

    def test_a_server_that_drafts_more(self) -> None:
        window = Counts(drafts=100, draft_tokens=500, by_position=(50, 30, 10, 5, 2))
        assert expected((0.5, 0.3, 0.1), window, 3) == pytest.approx(observed(window, 3))

    @given(
        st.lists(st.floats(0.01, 0.99), min_size=1, max_size=5),
        st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any),
    )
    def test_no_mixture_of_k_is_below_the_expected(self, ratios: list[float], rounds: list[int]) -> None:
        """Whatever K is drawn, independently of the text, healthy figures are not below the bound."""
        shares: list[float] = []
        for ratio in ratios:
            shares.append((shares[-1] if shares else 1.0) * ratio)
        most = len(rounds)
        drafts = sum(rounds)
        by_position = [sum(rounds[at:]) * (shares[at] if at < len(shares) else 0) for at in range(most)]
        window = Counts.model_construct(
            drafts=drafts, draft_tokens=sum((k + 1) * n for k, n in enumerate(rounds)), by_position=tuple(by_position)
        )
        assert (observed(window, len(shares)) >= expected(tuple(shares), window, len(shares)) - 1e-9).all()


class TestReference:
    VALIDATION = {
        "draft_tokens": 2, "temperature": 0.0, "vllm_version": "0.32.0", "acceptance_by_position": [0.5, 0.25],
        "reference": {"by_prompt": prompt_counts(["chat", "code"], [[2, 0, 1], [0]], 2)},
    }  # fmt: skip

    def test_rounds_become_counts(self) -> None:
        assert self.VALIDATION["reference"] == {
            "by_prompt": [
                {"kind": "chat", "drafts": 3, "by_position": [2, 1]},
                {"kind": "code", "drafts": 1, "by_position": [0, 0]},
            ]
        }

    def test_round_trip(self, tmp_path: Path) -> None:
        write_reference(tmp_path, self.VALIDATION)
        found = read_reference(tmp_path)
        assert found.acceptance_length == 1.75
        assert found.prompts[0].by_position == (2, 1)

    def test_mistakes(self, tmp_path: Path) -> None:
        with pytest.raises(BundleError, match="is no bundle"):
            read_reference(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(BundleError, match="packed without validation"):
            read_reference(tmp_path)
        for text, words in (("{", "not readable"), ("[]", "acceptance.json"), ('{"format": 2}', "format")):
            (tmp_path / "acceptance.json").write_text(text)
            with pytest.raises(BundleError, match=words):
                read_reference(tmp_path)
        (tmp_path / "acceptance.json").write_text(reference(0.2, 0.1).model_dump_json().replace("[0.2,0.1]", "[0.1,0.2]", 1))
        with pytest.raises(BundleError, match="must not rise"):
            read_reference(tmp_path)
