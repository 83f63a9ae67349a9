"""How the command line ends: an interruption is told."""

from __future__ import annotations

import pytest
import typer

from eagle import cli


def test_an_interruption_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @app.command()
    def work() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(cli.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(cli, "_private_environment", lambda: None)
    monkeypatch.setattr("sys.argv", ["eagle"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
