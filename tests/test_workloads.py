"""A workload is read exactly, and what is broken is refused by file, line and field."""

import gzip
import json

import numpy as np
import pytest

from jaxsched.core.config import MAX_COUNT
from jaxsched.simulation.workloads import Workload, WorkloadError
from jaxsched.simulation.workloads_reading import read_workload
from jaxsched.simulation.workloads_synthetic import synthetic_workload

GOOD = {"timestamp": 5, "segments": [["a", 4], ["b", 3]], "output_length": 2}
LINKS = "timestamp_s,input_len,output_len,parent,shared_len,kind"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


@pytest.fixture
def write(tmp_path):
    def write_lines(*lines):
        path = tmp_path / "work.load"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts) + "\n")
        return str(path)

    return write_lines


def tokens(workload: Workload, index: int) -> list[int]:
    return workload.prompt_token_ids(index).tolist()


def test_segments_share_tokens_by_name_from_their_start(write):
    workload = read_workload(
        write(
            GOOD,
            {**GOOD, "segments": [["b", 5], ["a", 2]]},
            {**GOOD, "segments": [["a", 2], ["a", 2]]},
        )
    )
    first, second, third = (tokens(workload, index) for index in range(3))
    a, b = first[:4], first[4:]
    assert len({*a, *b}) == 7
    assert second[:3] == b and second[5:] == a[:2]
    assert not {*second[3:5]} & {*first}
    assert third == a[:2] * 2
    assert workload.prompt_token_ids(0, 2, 5).tolist() == first[2:5]
    assert workload.prompt_token_ids(0).dtype == np.int32


def test_a_turn_repeats_its_parents_answer(write):
    parent = {"id": "t1", "timestamp": 0, "segments": [["u", 3]], "output_length": 4}
    child = {
        "id": 7,
        "timestamp": 9.25,
        "segments": [["u", 3], ["answer:t1", 4], ["v", 1]],
        "output_length": 1,
        "snapshot_points": [0, 2, 70],
        "priority": -3,
        "lora_id": 2,
        "cancel_at": 10,
    }
    workload = read_workload(write(parent, child))
    assert tokens(workload, 1)[3:7] == workload.answer_token_ids(0).tolist()
    assert tokens(workload, 1)[:3] == tokens(workload, 0)
    request = workload.requests[1]
    assert (request.request_id, request.arrival_ns) == (7, 9_250_000)
    assert (request.snapshot_points, request.priority) == ((0, 2, 70), -3)
    assert (request.lora_id, request.cancel_at_ns) == (2, 10_000_000)


def test_hash_blocks_share_tokens_by_id(write):
    line = {"timestamp": 0, "output_length": 1}
    path = write(
        {**line, "input_length": 10, "hash_ids": [9, 2**63, 5]},
        {**line, "input_length": 8, "hash_ids": [9, 5]},
    )
    workload = read_workload(path, hash_block=4)
    first, second = tokens(workload, 0), tokens(workload, 1)
    assert first[:4] == second[:4]
    assert first[8:] == second[4:6] and len({*first, *second}) == 12
    with pytest.raises(WorkloadError, match=":1: hash_ids must have 1 entries .* 512"):
        read_workload(path)


def test_given_token_ids_are_kept_and_never_met_by_others(write):
    given = {"timestamp": 0, "token_ids": [5, 0, 900, 5], "output_length": 2}
    workload = read_workload(write(given, GOOD))
    at = [request.num_prompt_tokens for request in workload.requests].index(4)
    assert tokens(workload, at) == [5, 0, 900, 5]
    assert min(tokens(workload, 1 - at)) > 900
    assert min(workload.answer_token_ids(at)) > 900


def test_links_share_exactly_the_tokens_they_say(write):
    workload = read_workload(
        write(LINKS, "0.5,6,3,-1,0,0", "1.25,10,2,0,8,1", "1.5,4,1,1,4,0")
    )
    first, second, third = (tokens(workload, index) for index in range(3))
    answer = workload.answer_token_ids(0).tolist()
    assert second[:8] == (first + answer)[:8]
    assert not {*second[8:]} & {*first, *answer}
    assert third == second[:4]
    assert workload.requests[1].arrival_ns == 1_250_000_000


def test_azure_and_burst_rows_have_times_and_lengths_only(write):
    azure = read_workload(
        write(
            "\ufeff" + AZURE,
            "2023-11-16 18:17:04.0319600,30,2",
            "2023-11-16 18:17:03.9799600,20,1",
        )
    )
    assert [r.num_prompt_tokens for r in azure.requests] == [20, 30]
    times = [request.arrival_ns for request in azure.requests]
    assert times[1] - times[0] == 52_000_000
    assert not {*tokens(azure, 0)} & {*tokens(azure, 1)}
    burst = read_workload(
        write(BURST, "5,GPT-4,0,0,0,API log", '6.5,"GPT,4",7,3,10,API log')
    )
    assert [r.num_prompt_tokens for r in burst.requests] == [7]
    assert (burst.num_dropped, burst.requests[0].arrival_ns) == (1, 6_500_000_000)


def test_gzip_blank_lines_and_limits(tmp_path):
    path = tmp_path / "packed"
    line = json.dumps(GOOD).encode()
    path.write_bytes(gzip.compress(b"\n" + line + b"\r\n\n" + line + b"\nnot json\n"))
    assert len(read_workload(str(path), limit=2).requests) == 2
    with pytest.raises(WorkloadError, match=r"packed:5: not valid JSON at column"):
        read_workload(str(path))
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(WorkloadError, match=r"packed(:\d+)?: cannot be read"):
        read_workload(str(path))


BROKEN_LINES = {
    '{"timestamp": 1': "not valid JSON",
    "[1]": "object",
    '{"timestamp": 1, "timestamp": 2}': "timestamp is given twice",
    "[" * 100_000: "",
}
BROKEN_FIELDS = (
    ({"timestamp": None}, "timestamp is missing"),
    ({"timestamp": -1}, r"timestamp must be in \[0, .* got -1"),
    ({"timestamp": float("nan")}, "timestamp .* got nan"),
    ({"timestamp": float("inf")}, "timestamp .* got inf"),
    ({"timestamp": "5"}, "timestamp must be a number of milliseconds, got '5'"),
    ({"timestamp": True}, "timestamp .* got True"),
    ({"output_length": None}, "output_length is missing"),
    ({"output_length": 0}, "output_length must be >= 1, got 0"),
    ({"output_length": 2.5}, "output_length must be an integer, got 2.5"),
    ({"output_length": float("nan")}, "output_length must be an integer, got nan"),
    ({"output_length": 2**31}, f"output_length must be <= {MAX_COUNT}, got {2**31}"),
    ({"output_length": MAX_COUNT}, "prompt and answer together .* got 7"),
    ({"segments": None}, "one of hash_ids, token_ids, segments is missing"),
    ({"token_ids": [1]}, "token_ids and segments are both given"),
    ({"segments": {}}, "segments must be a list of pairs, got {}"),
    ({"segments": [["a"]]}, r"segments\[0\] must be \[name, tokens\], got \['a'\]"),
    ({"segments": [["a", 1], ["b", -1]]}, r"segments\[1\]: tokens of 'b' .* got -1"),
    ({"segments": [[3, 1]]}, r"segments\[0\]: the name must be a string, got 3"),
    ({"segments": [["a", 0]]}, "the prompt must have a token"),
    ({"segments": [["answer:x", 1]]}, r"segments\[0\] names an unknown request 'x'"),
    ({"segments": [["answer:me", 1]], "id": "me"}, "repeats its own answer"),
    ({"segments": [["answer:0", 3]]}, "repeats 3 tokens of an answer that has 2"),
    ({"segments": [["a", MAX_COUNT], ["b", 9]]}, "prompt and answer together"),
    ({"segments": None, "token_ids": [4, -4]}, r"token_ids\[1\] must be >= 0, got -4"),
    ({"segments": None, "token_ids": []}, "token_ids must not be empty"),
    ({"segments": None, "hash_ids": [1]}, "input_length is missing"),
    ({"input_length": 9}, "input_length is 9, the prompt has 7"),
    ({"id": "0"}, "id '0' is taken by .*:1"),
    ({"id": 1.5}, "id must be a string or an integer, got 1.5"),
    ({"snapshot_points": [4, 3]}, "snapshot_points must ascend, got 3 after 4"),
    ({"snapshot_points": [3, 3]}, "snapshot_points must ascend, got 3 after 3"),
    ({"snapshot_points": [-3]}, r"snapshot_points\[0\] must be >= 0, got -3"),
    ({"snapshot_points": 3}, "snapshot_points must be a list of integers, got 3"),
    ({"snapshot_points": [*range(5000)]}, "snapshot_points has 5000 entries"),
    ({"snapshot_point": [3]}, "unknown field snapshot_point, did you mean"),
    ({"priority": 0.5}, "priority must be an integer, got 0.5"),
    ({"lora_id": 2**16}, "lora_id must be <= 65534"),
    ({"cancel_at": 4}, "cancel_at must not be before timestamp=5, got 4"),
    ({"cancel_at": "x"}, "cancel_at must be a number of milliseconds, got 'x'"),
)


@pytest.mark.parametrize(("text", "message"), BROKEN_LINES.items())
def test_a_broken_line_is_refused(write, text, message):
    with pytest.raises(WorkloadError, match=rf"work\.load:2: .*{message}"):
        read_workload(write(GOOD, text))


@pytest.mark.parametrize(("change", "message"), BROKEN_FIELDS)
def test_a_broken_field_is_refused(write, change, message):
    line = {**GOOD, **change}
    line = {name: value for name, value in line.items() if value is not None}
    with pytest.raises(WorkloadError, match=rf"work\.load:2: .*{message}"):
        read_workload(write(GOOD, line))


@pytest.mark.parametrize(
    ("header", "good", "row", "message"),
    [
        (LINKS, "0,6,3,-1,0,0", "1,6,3,1,0,0", "parent must be an earlier row than 1"),
        (LINKS, "0,6,3,-1,0,0", "1,6,3,-2,0,0", "parent must be >= -1, got -2"),
        (LINKS, "0,6,3,-1,0,0", "1,6,3,-1,2,0", "shared_len must be at most 0"),
        (LINKS, "0,6,3,-1,0,0", "1,99,3,0,10,0", "shared_len must be at most 9"),
        (LINKS, "0,6,3,-1,0,0", "1,6,3", "6 columns are needed"),
        (LINKS, "0,6,3,-1,0,0", "1,6,0,-1,0,0", "output_len must be >= 1, got 0"),
        (LINKS, "0,6,3,-1,0,0", "nan,6,3,-1,0,0", "timestamp_s .* got 'nan'"),
        (
            AZURE,
            "2023-11-16 18:17:03,1,1",
            "2023-11-16 18:17:03,1.5,1",
            "ContextTokens",
        ),
        (AZURE, "2023-11-16 18:17:03,1,1", "2023-13-16 18:17:03,1,1", "TIMESTAMP must"),
        (
            AZURE,
            "2023-11-16 18:17:03,1,1",
            "2023-11-16 18:17:03,1,-1",
            "Generated.* -1",
        ),
        (AZURE, "2023-11-16 18:17:03,1,1", '2023-11-16 18:17:03,"1', "not valid CSV"),
        (BURST, "0,m,1,1,2,l", "0,m,9999999999,1,2,l", "Request tokens must be <="),
        (BURST, "0,m,1,1,2,l", "-1,m,1,1,2,l", r"Timestamp must be in \[0"),
    ],
)
def test_a_broken_row_is_refused(write, header, good, row, message):
    with pytest.raises(WorkloadError, match=rf"work\.load:3: .*{message}"):
        read_workload(write(header, good, row))


def test_files_that_hold_nothing_known_are_refused(write, tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("\n \n")
    with pytest.raises(WorkloadError, match="empty: empty, no requests"):
        read_workload(str(empty))
    with pytest.raises(WorkloadError, match="no requests"):
        read_workload(write(AZURE))
    with pytest.raises(WorkloadError, match=r":1: neither a JSON object nor .* 'a,b'"):
        read_workload(write("a,b", "1,2"))
    with pytest.raises(WorkloadError, match="absent: cannot be read"):
        read_workload(str(tmp_path / "absent"))
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_workload(str(tmp_path))
    empty.write_bytes(b'{"id": "\xff"}')
    with pytest.raises(WorkloadError, match="empty:1: not UTF-8"):
        read_workload(str(empty))
    with pytest.raises(WorkloadError, match="hash_block is given"):
        read_workload(write(GOOD), hash_block=16)


def test_generated_chats_are_the_same_every_time_and_share_prefixes():
    one, other = (
        synthetic_workload(3, num_chats=20),
        synthetic_workload(3, num_chats=20),
    )
    assert one.requests == other.requests
    assert one.requests != synthetic_workload(4, num_chats=20).requests
    ids = {request.request_id: at for at, request in enumerate(one.requests)}
    turn = next(name for name in ids if name.endswith(".1"))
    before = ids[turn.replace(".1", ".0")]
    said = [*tokens(one, before), *one.answer_token_ids(before)]
    assert tokens(one, ids[turn])[: len(said)] == said
    assert len(synthetic_workload(3, limit=5).requests) == 5
