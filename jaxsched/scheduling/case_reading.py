"""What all kinds of case dictionaries share: ids, records, adapters, complaints."""

from collections.abc import Iterable, Mapping, Sequence

from jaxsched.core.host import check_count


class CaseError(ValueError):
    """A case that cannot be read; `index` is its place among the cases."""

    def __init__(self, index: int, message: str):
        super().__init__(message)
        self.index = index


def refuse_unknown(case: Mapping[str, object], known: Iterable[str]) -> None:
    """Raises ValueError unless a case is an object whose keys are all known."""
    if not isinstance(case, Mapping):
        raise ValueError(f"a case must be a JSON object, got {case!r}")
    unknown = sorted(set(case) - set(known))
    if unknown:
        raise ValueError(
            f"unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )


def read_record(at: int, request: object) -> dict:
    """A case's request as a record for `request_columns`; its id stays outside."""
    if not isinstance(request, Mapping):
        raise ValueError(f"requests[{at}] must be a JSON object, got {request!r}")
    if "id" not in request:
        raise ValueError(f"requests[{at}].id is missing")
    record = {key: value for key, value in request.items() if key != "id"}
    record["request_id"] = at
    return record


def rank_adapters(records: Sequence[dict]) -> None:
    """Replaces adapter ids of any size by their ranks, which sort alike."""
    adapters = {
        check_count(f"requests[{at}].lora_id", record["lora_id"], high=2**63 - 1)
        for at, record in enumerate(records)
        if record.get("lora_id") is not None
    }
    ranks = {adapter: rank for rank, adapter in enumerate(sorted(adapters))}
    for record in records:
        if record.get("lora_id") is not None:
            record["lora_id"] = ranks[record["lora_id"]]


def check_ids(ids: Sequence[object]) -> None:
    """Raises ValueError unless ids are integers or strings, each but once."""
    seen = set()
    for at, name in enumerate(ids):
        if isinstance(name, bool) or not isinstance(name, int | str):
            raise ValueError(
                f"requests[{at}].id must be an integer or a string, got {name!r}"
            )
        if name in seen:
            raise ValueError(f"requests[{at}].id repeats {name!r}")
        seen.add(name)
