"""`python -m jaxsched plan`: answers planning cases, one JSON line each.

A line is a case, or an object with the case under `input` and the right answer under
`expected`. Three kinds are told apart by their keys: `capacity` (admission),
`requests` (one scheduling step), otherwise the snapshot points of one prompt.
"""

import argparse
import json
from collections.abc import Callable, Sequence

from jaxsched.cli.reading import STDIN, InputError, json_lines

_SHOWN_MISMATCHES = 5


def add_parser(subparsers) -> None:
    """Adds the command to the program's argument parser."""
    parser = subparsers.add_parser(
        "plan",
        help="plan one step for each case of a JSON-lines file",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", nargs="?", default=STDIN, help="default: standard input"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--check", action="store_true", help="compare with the `expected` of each line"
    )
    form.add_argument(
        "--explain", action="store_true", help="print a readable table of each plan"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    lines = list(json_lines(args.file))
    if not lines:
        raise InputError(f"{args.file}: no cases")
    inputs = [_input(where, value) for where, value in lines]
    if args.check:
        for where, value in lines:
            if not isinstance(value, dict) or "expected" not in value:
                raise InputError(f"{where}: expected is missing, --check needs it")
    answers = _answer(lines, inputs)
    if args.check:
        expected = [value["expected"] for _, value in lines]
        return _check([where for where, _ in lines], answers, expected)
    if args.explain:
        from jaxsched.cli import explain

        for (where, _), case, answer in zip(lines, inputs, answers, strict=True):
            explain.print_case(where, case, answer)
        return 0
    for answer in answers:
        print(json.dumps(answer, separators=(",", ":")))
    return 0


def _input(where: str, value: object) -> dict:
    case = value.get("input", value) if isinstance(value, dict) else value
    if not isinstance(case, dict):
        raise InputError(f"{where}: a case must be a JSON object, got {case!r}")
    return case


def _answer(lines: Sequence[tuple[str, object]], inputs: Sequence[dict]) -> list:
    """Answers in the order of the lines; cases of one kind are answered together."""
    from jaxsched.scheduling import capacity_cases, cases
    from jaxsched.scheduling.case_reading import CaseError

    answers: list = [None] * len(inputs)
    kinds: dict[Callable, list[int]] = {}
    for index, case in enumerate(inputs):
        if "capacity" in case:
            kind = capacity_cases.answer_capacity_cases
        elif "requests" in case:
            kind = cases.answer_plan_cases
        else:
            kind = cases.answer_points_cases
        kinds.setdefault(kind, []).append(index)
    for answer_cases, members in kinds.items():
        try:
            found = answer_cases([inputs[index] for index in members])
        except CaseError as wrong:
            where = lines[members[wrong.index]][0]
            raise InputError(f"{where}: {wrong}") from wrong
        for index, answer in zip(members, found, strict=True):
            answers[index] = answer
    return answers


def _check(places: Sequence[str], answers: Sequence, expected: Sequence) -> int:
    wrong = [
        (where, answer, right)
        for where, answer, right in zip(places, answers, expected, strict=True)
        if not _agrees(answer, right)
    ]
    for where, answer, right in wrong[:_SHOWN_MISMATCHES]:
        print(f"{where}:\n  expected {json.dumps(right)}\n  got      {_cut(answer)}")
    print(f"matched {len(answers) - len(wrong)} of {len(answers)}")
    return 1 if wrong else 0


def _agrees(answer: object, right: object) -> bool:
    """Whether every expected key has the expected value; any error matches `true`."""
    if not isinstance(right, dict) or not isinstance(answer, dict):
        return answer == right
    if "error" in right or "error" in answer:
        return "error" in right and "error" in answer
    return all(key in answer and answer[key] == value for key, value in right.items())


def _cut(answer: object, longest: int = 2000) -> str:
    text = json.dumps(answer)
    return text if len(text) <= longest else text[:longest] + " ..."
