"""What the README shows is what happens."""

import re

from shared_data import ROOT

README = (ROOT / "README.md").read_text()


def _block(language, after):
    start = README.index(after)
    found = re.compile(rf"```{language}\n(.*?)```", re.DOTALL).search(README, start)
    return found.group(1)


def test_the_planning_example_prints_what_it_says(capsys):
    example = _block("python", "## Planning inside your own")
    assert len(example.strip().splitlines()) <= 17
    promised = re.search(r"print\(.*\)  # (.*)", example).group(1)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() == promised


def test_both_commands_set_up_and_run():
    for marker, last in (
        ("<!-- main command -->", "python -m jaxsched replay"),
        ("<!-- test command -->", "python -m pytest -n 2 --dist loadfile"),
    ):
        command = _block("bash", marker).strip()
        assert "\n" not in command
        assert command.startswith("python3 -m venv .venv && ")
        assert command.endswith(last)
