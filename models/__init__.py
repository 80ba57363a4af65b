"""Hybrid models in Flax that consume a plan.

What is promised of a model step, and tested (`tests/test_models_bits.py`, and for any
checkpoint `python -m jaxsched verify`): a request's prefill logits and its states have
the same bits whatever the schedule cut, batched, ordered or restored; so have its
decode logits after a given prompt. The rules that keep them stand beside the code:

* `ssd`: an absolute chunk grid, cells of fixed shape, states passed strictly in
  sequence, in float32;
* `conv`: only raw products are kept between calls, elementwise work comes after fresh
  and kept rows are merged; with tails, the open cell is computed again from its start;
* `batch`: one number of cells a deployment; decoding rows in products of their own;
* `paged_attention`: keys block after block, in order, whatever the table's width;
* `moe`: no capacity, sums in a fixed order.

Limits. Without tails (`StepShape.carry_tails=False`) cuts must fall on multiples of the
scan chunk, a prompt's last excepted. A state left by decoding, or filed off the grid
without tails, continues within rounding (1e-6), not bit for bit. Nothing is promised
across backends, jax versions, numbers of cells, dtypes, or between prefilling a token
and decoding it.
"""
