"""Entry points of the planner's oracle: a plain case in, a plain answer out."""

import dataclasses

from oracles.planner_jaxsched import plan_jaxsched
from oracles.planner_tensorrt_llm import plan_tensorrt_llm
from oracles.records import Case, golden_form, read_case


def plan(case):
    """The `records.Answer` to a `records.Case` or to the `input` of a case file."""
    if not isinstance(case, Case):
        case = read_case(case)
    if case.rules == "tensorrt_llm":
        return plan_tensorrt_llm(case)
    return plan_jaxsched(case)


def expected(case):
    """The `expected` of a case file that holds this `input`."""
    case = read_case(case)
    return golden_form(case, plan(case))


def fields(answer):
    """The answer as a dict, to be compared field by field."""
    return dataclasses.asdict(answer)
