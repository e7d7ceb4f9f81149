"""Every alert has its section in the runbook, and promtool, where it is at hand, agrees with the rules."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tests.deploy.support import DEPLOY, ROOT, alerts

RUNBOOK = ROOT / "docs" / "runbook.md"
PROMTOOL = shutil.which("promtool")


def test_every_alert_has_a_section_in_the_runbook_and_every_section_an_alert() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE) != []
    assert sorted(re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)) == sorted(names)


def test_links_of_the_runbook_lead_to_its_sections() -> None:
    text = RUNBOOK.read_text()
    sections = {name.lower() for name in re.findall(r"^## (\w+)$", text, re.MULTILINE)}
    assert set(re.findall(r"\(#(\w+)\)", text)) <= sections


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_what_it_is_and_where_to_look(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["runbook_url"].endswith(f"/docs/runbook.md#{str(rule['alert']).lower()}")
    assert "$labels.instance" in rule["annotations"]["summary"]
    assert rule["annotations"]["description"]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian and Ubuntu: apt install prometheus)")
@pytest.mark.parametrize(
    "command",
    [
        ("check", "rules", "alerts.yaml", "savings.yaml"),
        ("test", "rules", "alerts.test.yaml", "savings.test.yaml"),
    ],
)
def test_promtool_agrees(command: tuple[str, ...]) -> None:
    ran = subprocess.run(
        [str(PROMTOOL), *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
