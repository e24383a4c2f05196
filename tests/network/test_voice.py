"""Lines about one sandbox are bounded."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from sandyard.network.voice import LINES, PERIOD, Voice


def test_a_loud_sandbox_is_cut_short_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("sandyard.network.voice.time.monotonic", lambda: now)
    speaker = Voice("one")
    with capture_logs() as lines:
        for _ in range(LINES * 3):
            speaker.say("egress refused")
        assert len(lines) == LINES
        now += PERIOD
        speaker.say("egress refused", reason="x")
    assert lines[-2] == {
        "event": "network lines left out",
        "log_level": "info",
        "sandbox": "one",
        "count": LINES * 2,
    }
    assert lines[-1]["reason"] == "x"
