"""Is a jitted plan faster than plain Python and than NumPy? Needs a CPU only.

Whole micro batches of the `jaxsched` rules: host arrays in, the plan back on the host,
one flat buffer each way (`HostPlanner`), against the plain-Python oracle of the same
rules and against vectorised NumPy, in one run. Then 64 tables at once under `vmap`
against 64 calls, and a plan inside a larger jitted program.

    python -m benchmarks.planning
"""

import argparse
import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxsched as js
from benchmarks import harness, numpy_planner

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from oracles import planner as oracle  # noqa: E402  the tests' plain-Python rules
from oracles.records import Case, Row  # noqa: E402

POLICIES = ("force_chunk", "first_come_first_served", "equal_progress")
SHORT = {"first_come_first_served": "fcfs"}
SIZES = (64, 256, 1024, 8192, 65536)
REPLICAS = 64


def requests(num_rows: int, seed: int = 0) -> list[dict]:
    """Half of the rows decode, the others stand at the start of lognormal prompts."""
    draw = np.random.default_rng(seed)
    prompts = draw.lognormal(7, 1, num_rows).astype(int) + 2
    rows = []
    for at, prompt in enumerate(prompts.tolist()):
        decodes = at < num_rows // 2
        rows.append(
            {
                "num_prompt_tokens": prompt,
                "num_computed_tokens": prompt + 3 if decodes else 0,
                "num_output_tokens": 4 if decodes else 0,
                "phase": "decode" if decodes else "prefill",
                "snapshot_interval": 512,
                "max_new_tokens": 500,
            }
        )
    return rows


def limits(rows: list[dict], load: str) -> dict[str, int]:
    """A `tight` budget of 8,192 prompt tokens, or `half` of all that are waiting."""
    waiting = sum(r["num_prompt_tokens"] for r in rows if r["phase"] == "prefill")
    prompt_tokens = 8192 if load == "tight" else waiting // 2
    return {
        "max_num_batched_tokens": prompt_tokens + len(rows) // 2,
        "max_num_seqs": len(rows),
        "chunk_unit_size": 64,
        "max_context_length": 8192,
    }


def host_planner(config: js.SchedulerConfig, rows: list[dict], limit: dict):
    """A `HostPlanner` whose buffers hold the rows and the limits."""
    planner = js.HostPlanner(config, len(rows))
    table = js.request_table(rows, num_rows=len(rows), num_points=8)
    for field in dataclasses.fields(table):
        planner.requests[field.name][...] = np.asarray(getattr(table, field.name))
    for name, value in limit.items():
        planner.limits[name][...] = value
    return planner


def oracle_case(policy: str, rows: list[dict], limit: dict) -> Case:
    """The same step for the plain-Python oracle."""
    return Case(
        rules="jaxsched",
        chunking_policy=policy,
        snapshot_mode="cut",
        max_emit_points=8,
        encoder_decoder=False,
        group_by_lora=True,
        rows=[Row(id=at, **row) for at, row in enumerate(rows)],
        **limit,
    )


def compare(policy: str, num_rows: int, load: str) -> dict:
    """Times of one step in the three forms, after they have agreed on it."""
    rows = requests(num_rows)
    limit = limits(rows, load)
    config = js.SchedulerConfig(chunking_policy=policy)
    planner = host_planner(config, rows, limit)
    case = oracle_case(policy, rows, limit)
    in_numpy = functools.partial(
        numpy_planner.plan, planner.requests, limit, policy, True
    )
    answers = oracle.plan(case), planner.plan(), in_numpy()
    sizes = [np.asarray(answers[0].num_scheduled_tokens)]
    sizes += [answers[1].num_scheduled_tokens, answers[2]["num_scheduled_tokens"]]
    for other in sizes[1:]:
        np.testing.assert_array_equal(sizes[0], other)
    candidates = {
        "python": lambda: oracle.plan(case),
        "numpy": in_numpy,
        "jit": planner.plan,
    }
    return harness.measure(candidates, rounds=200)


def against_python_and_numpy(args: argparse.Namespace) -> list[dict]:
    """The main comparison, every policy, load and size."""
    results, table = [], []
    for load in ("tight",) if args.quick else ("tight", "half"):
        for policy in POLICIES:
            for num_rows in SIZES[:2] if args.quick else SIZES:
                # Rounds without end in plain Python: minutes for a single plan.
                if load == "half" and policy == "equal_progress" and num_rows > 8192:
                    continue
                figures = compare(policy, num_rows, load)
                results.append(
                    {"policy": policy, "load": load, "rows": num_rows, **figures}
                )
                table.append(
                    [
                        f"{SHORT.get(policy, policy)}, {load}",
                        f"{num_rows:,}",
                        *(
                            f"{figures[name]['min_us']:,.0f} / "
                            f"{figures[name]['median_us']:,.0f}"
                            for name in ("python", "numpy", "jit")
                        ),
                        f"{harness.ratio(figures, 'jit', 'python'):.1f}x",
                        f"{harness.ratio(figures, 'jit', 'numpy'):.1f}x",
                    ]
                )
    header = ["policy, load", "requests", "python", "numpy", "jit"]
    header += ["jit : python", "jit : numpy"]
    harness.print_table("one step, microseconds, min / median", header, table)
    return results


def replicas(args: argparse.Namespace) -> list[dict]:
    """64 tables of 64 rows: one vmapped call against 64 calls."""
    results, table = [], []
    for policy in POLICIES:
        config = js.SchedulerConfig(chunking_policy=policy, group_by_lora=False)
        rows = requests(64)
        budget = js.Budget(
            **{name: jnp.int32(value) for name, value in limits(rows, "tight").items()}
        )
        tables = [
            js.request_table(requests(64, seed), num_points=8)
            for seed in range(REPLICAS)
        ]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tables)
        one = jax.jit(functools.partial(js.schedule, config=config))
        many = jax.jit(jax.vmap(one, in_axes=(0, None)))
        candidates = {
            "64 calls": lambda one=one, tables=tables, budget=budget: [
                one(table, budget) for table in tables
            ],
            "vmap": lambda many=many, stacked=stacked, budget=budget: many(
                stacked, budget
            ),
        }
        figures = harness.measure(candidates, rounds=100)
        results.append({"policy": policy, **figures})
        table.append(
            [
                policy,
                *(
                    f"{figures[name]['min_us']:,.0f} / "
                    f"{figures[name]['median_us']:,.0f}"
                    for name in candidates
                ),
                f"{harness.ratio(figures, 'vmap', '64 calls'):.1f}x",
            ]
        )
    header = ["policy", "64 calls", "vmap", "vmap : calls"]
    harness.print_table(
        "64 tables of 64 rows, microseconds, min / median", header, table
    )
    return results


def inside_a_program(args: argparse.Namespace) -> list[dict]:
    """A plan as part of a larger jitted program, without a dispatch of its own."""
    results, table = [], []
    steps = 100
    for num_rows in SIZES[:2] if args.quick else SIZES[:4]:
        config = js.SchedulerConfig(group_by_lora=False)
        rows = requests(num_rows)
        state = js.request_table(rows, num_points=8)
        budget = js.Budget(
            **{name: jnp.int32(value) for name, value in limits(rows, "tight").items()}
        )

        def step(state, budget, config=config):
            return js.advance(state, js.schedule(state, budget, config))

        def loop(state, budget, step=step):
            return lax.fori_loop(0, steps, lambda _, s: step(s, budget), state)

        alone, within = jax.jit(step), jax.jit(loop)
        candidates = {
            "a call": lambda f=alone, s=state, b=budget: f(s, b),
            "inside": lambda f=within, s=state, b=budget: f(s, b),
        }
        figures = harness.measure(candidates, rounds=100)
        for key in figures["inside"]:
            figures["inside"][key] /= steps
        results.append({"rows": num_rows, **figures})
        table.append(
            [
                f"{num_rows:,}",
                *(
                    f"{figures[name]['min_us']:,.0f} / "
                    f"{figures[name]['median_us']:,.0f}"
                    for name in candidates
                ),
                f"{harness.ratio(figures, 'inside', 'a call'):.1f}x",
            ]
        )
    header = ["requests", "a call", "inside", "inside : call"]
    harness.print_table(
        "schedule and advance, microseconds, min / median", header, table
    )
    return results


def main(args: argparse.Namespace) -> dict:
    """Runs all three questions."""
    return {
        "step": against_python_and_numpy(args),
        "replicas": replicas(args),
        "inside": inside_a_program(args),
    }


if __name__ == "__main__":
    harness.run(__doc__.splitlines()[0], main)
