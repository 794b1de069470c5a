"""Call the command line in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradtrace.cli import main


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*argv: object) -> tuple[int, str, str]:
        status = main.run([str(word) for word in argv])
        out, err = capsys.readouterr()
        return status, out, err

    return call
