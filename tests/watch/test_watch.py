"""The watch as a whole: windows, state, events, and the command against a server of counters."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from eagle.bundle.reference import Reference
from eagle.config import WatchConfig
from eagle.errors import BusyError, ConfigError, StepFailed
from eagle.watch import run as watching
from eagle.watch.run import Watch, alone, default_state
from eagle.watch.scrape import parse
from eagle.watch.state import Change, State, load_state, save_state
from eagle.watch.watcher import Boundaries, take
from tests.watch.pages import FakeVllm, Site, serving
from tests.watch.test_counters import reference

ROOT = Path(__file__).parents[2]
CONFIG = WatchConfig(window_s=60.0, min_drafts=100)
SHARES = (0.6, 0.3, 0.15)


class Life:
    """A server and its watcher, with a clock of their own."""

    def __init__(self, positions: int = 3) -> None:
        self.fake, self.now, self.positions = FakeVllm(positions), 1_000_000.0, positions
        self.state = State(url="u", reference="r")
        self.known = Boundaries.of(reference(*SHARES), CONFIG)
        self.changes: list[Change] = []
        self.look()

    def look(self) -> None:
        self.changes += take(self.state, parse(self.fake.page(), "u"), self.now, CONFIG, self.known)

    def pass_time(self, windows: int, factor: float = 1.0, k: int | None = None, drafts: int = 200) -> None:
        """Let `windows` windows pass, each scraped four times, with the reference's acceptance times `factor`."""
        k = k or self.positions
        for _ in range(4 * windows):
            self.now += 15.0
            self.fake.work([round(drafts / 4 * share * factor) for share in SHARES[:k]], drafts // 4, k=k)
            self.look()


def test_healthy_then_drifting_then_degraded_then_well_again() -> None:
    life = Life()
    life.pass_time(60)
    assert (life.state.status, life.state.windows, life.changes) == ("healthy", 60, [])
    life.pass_time(150, factor=0.5)
    assert [c.status for c in life.changes] == ["drifting", "degraded"]
    assert life.changes[0].acceptance_length < life.changes[0].reference_length
    life.pass_time(400)
    assert [c.status for c in life.changes[2:]] == ["drifting", "healthy"]


def test_a_small_fall_is_none() -> None:
    life = Life()
    life.pass_time(300, factor=0.97)
    assert life.changes == []


def test_a_gap_in_the_scrapes_is_one_long_window() -> None:
    life = Life()
    life.now += 86400.0
    life.fake.work([600, 300, 150], 1000)
    life.look()
    assert (life.state.windows, life.state.closed[-1].counts.drafts) == (1, 1000)
    assert life.state.closed[-1].ended - life.state.closed[-1].began == 86400.0


def test_a_window_waits_for_several_requests() -> None:
    life = Life()
    for _ in range(20):
        life.now += 60.0
        life.fake.work([12, 6, 3], 24)  # rounds of a request that goes on and on
        life.look()
    assert life.state.windows == 0
    life.pass_time(1)
    assert (life.state.windows, life.state.closed[-1].counts.requests) == (1, 8)


def test_an_idle_server_is_no_evidence() -> None:
    life = Life()
    for _ in range(100):
        life.now += 3600.0
        life.look()
    assert (life.state.windows, life.state.status) == (0, "healthy")


def test_a_clock_set_back_does_not_lose_counts() -> None:
    life = Life()
    life.pass_time(1)
    life.fake.work([30, 15, 5], 50)
    life.now -= 7200.0
    life.look()
    assert life.state.open is not None
    assert life.state.open.counts.drafts == 50
    life.pass_time(2)
    assert life.state.windows >= 2


def test_restarts_leave_the_verdict_alone() -> None:
    life = Life()
    for _ in range(40):
        life.pass_time(2)
        life.fake = FakeVllm()
        life.now += 30.0
        life.look()
    assert (life.state.status, life.changes) == ("healthy", [])
    assert life.state.restarts == 40


@pytest.mark.parametrize("k", [1, 2])
def test_a_controller_that_drafts_less_is_no_drift(k: int) -> None:
    life = Life()
    for _ in range(50):
        life.pass_time(1)
        life.pass_time(2, k=k)
    assert life.changes == []


def test_a_fall_is_seen_although_k_varies() -> None:
    life = Life()
    for _ in range(100):
        life.pass_time(1, factor=0.5)
        life.pass_time(2, factor=0.5, k=1)
    assert "drifting" in [c.status for c in life.changes]


def test_a_page_without_an_engine_for_a_while_counts_nothing_twice() -> None:
    life = Life()
    life.pass_time(1)
    before = sum(w.counts.drafts for w in life.state.closed)
    life.changes += take(life.state, {}, life.now + 10, CONFIG, life.known)
    life.now += 20
    life.look()
    assert life.state.open is not None
    assert life.state.open.counts.drafts == 0
    assert before == 200


class TestState:
    def test_a_new_process_goes_on(self, tmp_path: Path) -> None:
        """Saved and loaded at every look, the watcher comes to the same state."""
        path, whole, parts = tmp_path / "s.json", Life(), Life()
        for factor in (1.0, 0.5):
            for _ in range(40):
                for life in (whole, parts):
                    life.pass_time(1, factor=factor)
                save_state(path, parts.state)
                parts.state, fresh = load_state(path, "u", "r")
                assert fresh == ""
        strip = {"engines": {"m/0": {"created"}}}
        assert parts.state.model_dump(exclude=strip) == whole.state.model_dump(exclude=strip)
        assert path.stat().st_size < 40_000

    def test_mistakes_are_one_line(self, tmp_path: Path) -> None:
        path = tmp_path / "s.json"
        save_state(path, State(url="u", reference="r"))
        with pytest.raises(ConfigError, match="is about u, not other"):
            load_state(path, "other", "r")
        assert load_state(path, "u", "another bundle")[1].startswith("the bundle is another one")
        for text in ("{", "[]", '{"format": 1}', '{"format": 1, "url": "u", "reference": "r", "detectors": {"x": {}}}'):
            path.write_text(text)
            with pytest.raises(ConfigError, match="remove it or give another --state"):
                load_state(path, "u", "r")
            assert path.read_text() == text, "evidence is not overwritten"

    def test_two_watchers_do_not_share_a_file(self, tmp_path: Path) -> None:
        with FileLock(tmp_path / "s.json.lock"), pytest.raises(BusyError, match="another process"), alone(tmp_path / "s.json"):
            pass

    def test_servers_have_files_of_their_own(self, tmp_path: Path) -> None:
        names = {default_state(tmp_path, url) for url in ("h:1", "h:2", "https://h:1", "http://h:1/x/metrics", "h:1/")}
        assert len(names) == 4
        assert all(re.fullmatch(r"[\w.-]+\.json", path.name) for path in names)


class TestEvents:
    def test_an_event_that_failed_is_sent_again_and_only_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sent: list[str] = []
        broken = [True]

        def tell(change: Change, _state: State) -> None:
            if broken[0]:
                raise StepFailed("no server")
            sent.append(change.status)

        life = Life()
        watch = Watch("http://h:1", reference(*SHARES), CONFIG, tmp_path / "s.json", tell)
        monkeypatch.setattr(watching, "fetch", lambda *_: life.fake.page())
        monkeypatch.setattr(watching.time, "time", lambda: life.now)
        while watch.state.status == "healthy":
            watch.look()
            life.now += 60
            life.fake.work([40, 20, 10], 200)
        assert sent == []
        assert not watch.state.changes[-1].told
        again = Watch("http://h:1", reference(*SHARES), CONFIG, tmp_path / "s.json", tell)
        broken[0] = False
        again.look()
        again.look()
        assert sent == ["drifting"]
        assert Watch("http://h:1", reference(*SHARES), CONFIG, tmp_path / "s.json").state.changes[-1].told


@pytest.fixture
def site() -> Iterator[Site]:
    with serving() as found:
        yield found


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bün dle"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    content: Reference = reference(*SHARES)
    (folder / "acceptance.json").write_text(content.model_dump_json())
    return folder


def command(site_url: str, bundle: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "eagle", "--root", str(ROOT), "watch", site_url, "--bundle", str(bundle),
        "--state", str(bundle.parent / "state" / "s.json"), "--set", "watch.window_s=1", "--set", "watch.min_drafts=30",
        "--set", "watch.min_requests=1", *more,
    ]  # fmt: skip


def once(site_url: str, bundle: Path, *more: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command(site_url, bundle, "--once", *more), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


class TestCommand:
    def test_once_says_and_returns_the_status(self, site: Site, bundle: Path) -> None:
        code, out, err = once(site.url, bundle)
        assert code == 0, err
        assert "no window yet" in out
        assert "first start" in err
        state = bundle.parent / "state" / "s.json"
        for alarm, expected in ((("drifting",), 10), (("drifting", "degraded"), 11)):
            content = json.loads(state.read_text())
            for level in alarm:
                content["detectors"][level]["alarm"] = True
            state.write_text(json.dumps(content))
            code, out, _ = once(site.url, bundle)
            assert code == expected
            assert out.startswith(f"watch: {alarm[-1]}")
            assert "next: eagle dataset from-traffic" in out

    def test_unreachable_is_a_code_of_its_own_and_keeps_the_state(self, site: Site, bundle: Path) -> None:
        once(site.url, bundle)
        state = bundle.parent / "state" / "s.json"
        before = state.read_text()
        site.status = 500
        code, out, err = once(site.url, bundle)
        assert (code, out) == (12, "")
        assert err.startswith("error: watch: ")
        assert err.count("\n") == 1
        assert state.read_text() == before

    def test_mistakes(self, site: Site, bundle: Path, tmp_path: Path) -> None:
        site.body = "<html>"
        assert once(site.url, bundle)[0] == 2
        assert once("ftp://x", bundle)[0] == 2
        code, _, err = once(site.url, tmp_path / "none")
        assert (code, err.count("\n")) == (6, 1)
        (bundle / "acceptance.json").write_text(reference(0.5, prompts=[(100, [50])]).model_dump_json())
        code, _, err = once(site.url, bundle)
        assert (code, err.count("\n")) == (6, 1), err
        assert "no fall can be told from 1 prompt with first-position acceptance 0.50" in err

    def test_an_event_without_a_prefect_server_is_refused(self, site: Site, bundle: Path, tmp_path: Path) -> None:
        code, _, err = once(site.url, bundle, "--event", PREFECT_API_URL="", PREFECT_HOME=str(tmp_path / "prefect"))
        assert code == 5, err
        assert "PREFECT_API_URL" in err

    def test_it_follows_through_an_outage_and_ends_on_a_signal(self, site: Site, bundle: Path) -> None:
        process = subprocess.Popen(
            command(site.url, bundle, "--set", "watch.interval_s=0.1"), cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stderr is not None
        lines: list[str] = []

        def wait_for(words: str) -> None:
            assert process.stderr is not None
            while words not in (line := process.stderr.readline()):
                assert line, lines
                lines.append(line)

        try:
            wait_for("no window yet")
            site.status = 503
            wait_for("answers 503")
            site.status = 200
            wait_for("answers again")
            assert site.server is not None
            site.server.work([60, 30, 15], 100)
            wait_for("watch: healthy: acceptance length 2.05 [0.60 0.30 0.15] of 100 drafts")
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 143
        finally:
            process.kill()
            process.wait()


def test_this_package_does_not_import_prefect() -> None:
    code = "import sys, eagle.watch.display; sys.exit('prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=120).returncode == 0
