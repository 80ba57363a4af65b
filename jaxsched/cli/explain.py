"""The readable form of a planning answer: a table with a reason for every row."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxsched.core.config import UNLIMITED

_REASONS = {
    "wrong_phase": "not schedulable in this phase",
    "in_flight": "an earlier step still holds it",
    "no_budget": "the token budget is used up",
    "below_unit": "too few tokens left to reach a unit boundary",
    "batch_full": "max_num_seqs rows are taken",
    "beam_width": "the batch decodes with another beam width",
    "behind_blocked": "an earlier row did not fit",
    "too_large": "no step of this budget can take it",
    "waiting_for_encoder": "its encoder output is not ready",
    "not_admitted": "no room in the cache",
    "held": "held by the caller",
    "plan_error": "the step was refused",
}


def print_case(where: str, case: dict, answer: object) -> None:
    """Prints one case's answer for a person."""
    console = Console(soft_wrap=False)
    if isinstance(answer, list):
        console.print(f"[bold]{where}[/]: {len(answer)} snapshot points: {answer}")
        return
    if "error" in answer:
        console.print(Text(f"{where}: refused: {answer['error']}", style="red"))
        return
    if "admitted" in answer:
        console.print(_admission_table(where, answer))
        return
    console.print(Text(_headline(where, case, answer), style="bold"))
    console.print(_plan_table(case, answer))
    for reason in sorted({entry["reason"] for entry in answer["reasons"]}):
        console.print(Text(f"  {reason}: {_REASONS[reason]}", style="dim"))


def _admission_table(where: str, answer: dict) -> Table:
    table = Table(title=f"{where}: admission", title_justify="left")
    table.add_column("decision")
    table.add_column("requests")
    for decision in ("admitted", "disagg_decode_init", "preempted"):
        names = ", ".join(str(name) for name in answer[decision])
        table.add_row(decision, names or "-")
    return table


def _headline(where: str, case: dict, answer: dict) -> str:
    budget = case.get("max_num_batched_tokens")
    budget = "unlimited" if budget in (None, UNLIMITED) else budget
    return (
        f"{where}: {answer['num_batched_tokens']} of {budget} tokens; "
        f"{case.get('rules', 'jaxsched')} rules, "
        f"{case.get('chunking_policy', 'force_chunk')}, "
        f"unit {case['chunk_unit_size']}"
    )


def _plan_table(case: dict, answer: dict) -> Table:
    chunks = {entry["id"]: entry for entry in answer["prefill"]}
    reasons = {entry["id"]: entry["reason"] for entry in answer["reasons"]}
    points = {entry["id"]: [entry["position"]] for entry in answer["snapshots"]}
    for entry in answer["emit"]:
        points[entry["id"]] = entry["positions"] + points.get(entry["id"], [])
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("id", "phase"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "drafts", "prompt computed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("snapshots at")
    table.add_column("why nothing", no_wrap=True)
    for request in case["requests"]:
        table.add_row(*_row(request, chunks, reasons, points))
    return table


def _row(request: dict, chunks: dict, reasons: dict, points: dict) -> list[str]:
    name, start = request["id"], request.get("num_computed_tokens", 0)
    prompt, phase = request["num_prompt_tokens"], request.get("phase", "prefill")
    if name in reasons:
        progress = f"{start} of {prompt}"
        return [str(name), phase, "-", "-", progress, "", reasons[name]]
    if name in chunks:
        size = chunks[name]["num_scheduled_tokens"]
        drafts = str(chunks[name]["num_draft_tokens"])
        progress = f"{start} -> {start + size} of {prompt}"
        at = ", ".join(str(point) for point in points.get(name, []))
        return [str(name), phase, str(size), drafts, progress, at, ""]
    if phase == "encode":
        size, drafts = request.get("num_encoder_tokens", 0), "-"
    else:
        size, drafts = request.get("beam_width", 1), request.get("num_draft_tokens", 0)
    return [str(name), phase, str(size), str(drafts), f"{start} of {prompt}", "", ""]
