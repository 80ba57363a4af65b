"""The kernels of a step: work and bytes of each, as linear functions of the load.

Formulas per layer, with b bytes an element, w the width of the short convolution:

* attention, H heads of D, K key heads: 4 H D FLOPs a pair of query and key; a decode
  row reads 2 K D b a token of its context; a prefill token moves 2 (H + K) D b.
* Mamba-2, H heads of P, state N, G groups, chunk Q: 2 Q (G N + H P) + 4 H P N FLOPs a
  prefill token, 6 H P N a decode row; a decode row reads and writes its state.
* gated delta net, chunk C: 2 C (2 dk + dv) + 6 dk dv FLOPs a value head and prefill
  token, 8 dk dv a decode row.
* experts: T tokens touch 1 - (1 - k / E) ** T of the weights.
"""

import dataclasses
import enum
from collections import Counter
from collections.abc import Iterator

from jaxsched.cache.sizing import ElementTypes, cache_bytes
from jaxsched.cache.sizing_layers import LayerShape
from jaxsched.core.host import check_count
from jaxsched.simulation.costs_models import ModelDescription, ModelFacts

ACTIVATION_BYTES = 2
"""Of an element between layers: bf16, whatever the weights are."""


class CostClass(enum.StrEnum):
    """Classes of operators; a step's time is the sum over them."""

    GEMM = "gemm"
    EXPERTS = "experts"
    ATTENTION_PREFILL = "attention_prefill"
    ATTENTION_DECODE = "attention_decode"
    SCAN = "scan"
    STATE_UPDATE = "state_update"
    ELEMENTWISE = "elementwise"
    LM_HEAD = "lm_head"
    COLLECTIVE = "collective"
    SNAPSHOT = "snapshot"
    OVERHEAD = "overhead"


COEFFICIENTS = {
    CostClass.GEMM: "gemm",
    CostClass.EXPERTS: "experts",
    CostClass.ATTENTION_PREFILL: "attention",
    CostClass.ATTENTION_DECODE: "attention",
    CostClass.SCAN: "scan",
    CostClass.STATE_UPDATE: "update",
    CostClass.ELEMENTWISE: "elementwise",
    CostClass.LM_HEAD: "gemm",
    CostClass.COLLECTIVE: "collective",
    CostClass.SNAPSHOT: "copy",
}
"""The coefficients of `Efficiency` that a class uses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operator:
    """One kernel, or `count` kernels of the same shape.

    Attributes:
      kind: its class.
      count: kernels of a step.
      when: the load that it works on; without any the kernel does not run.
      flops_per_unit, bytes_per_unit: for one unit of that load.
      stream_bytes: for a prefill token, moved while nothing else is done.
      fixed_bytes: read once, as weights are.
      shape: (inputs, outputs) of a matrix product on one rank, for measured tables.
      experts: (experts, experts of a token): only touched weights are read.
    """

    kind: CostClass
    count: int
    when: str
    flops_per_unit: float = 0.0
    bytes_per_unit: float = 0.0
    stream_bytes: float = 0.0
    fixed_bytes: float = 0.0
    shape: tuple[int, int] | None = None
    experts: tuple[int, int] | None = None


def model_operators(
    model: ModelDescription,
    types: ElementTypes = ElementTypes(),
    *,
    tensor_parallel: int = 1,
) -> tuple[Operator, ...]:
    """The kernels of one rank, equal ones counted together.

    Args:
      model: what to run.
      types: element types; 8-bit weights also mean 8-bit matrix products.
      tensor_parallel: ranks that share every layer. Widths are divided evenly (a
        head that is cut counts as its share); fewer KV heads than ranks are stored
        by several of them.

    Raises:
      ValueError: if the ranks cannot divide the model's states or KV heads.
    """
    ranks = check_count("tensor_parallel", tensor_parallel, low=1)
    make = _Maker(model.facts, types, ranks)
    found: Counter[Operator] = Counter()
    for layer, times in Counter(model.layers).items():
        for operator in make.layer(layer):
            found[operator] += times * operator.count
    found[make.head()] += 1
    if types.bytes_of("state"):
        sizes = cache_bytes(model.shape, types, tensor_parallel=ranks)
        if sizes.state:
            for when in ("snapshots_written", "snapshots_restored"):
                found[make.copy(sizes.state, when)] += 1
    return tuple(
        dataclasses.replace(operator, count=times) for operator, times in found.items()
    )


class _Maker:
    """Makes operators of a layer; widths are those of one rank."""

    def __init__(self, facts: ModelFacts, types: ElementTypes, ranks: int):
        self._facts, self._types, self._ranks = facts, types, ranks
        self._weight = types.bytes_of("weights")

    def layer(self, layer: LayerShape) -> Iterator[Operator]:
        kinds = {
            "attention": self._attention,
            "latent_attention": self._latent,
            "mamba2": self._mamba2,
            "mamba1": self._mamba1,
            "gated_delta_net": self._delta,
            "kimi_delta_attention": self._delta,
            "short_convolution": self._convolution,
            "mlp": self._mlp,
            "mixture_of_experts": self._experts,
        }
        if layer.kind not in kinds:
            raise ValueError(f"no costs are known for layers of kind {layer.kind!r}")
        yield from kinds[layer.kind](layer)
        # The norm in front: reads the stream and the layer's output, writes both.
        yield self._elementwise(4 * self._facts.hidden, ranks=1)
        if self._ranks > 1:
            yield self._reduction()

    def head(self) -> Operator:
        """The product with the vocabulary, for rows that give a token."""
        outputs = -(-self._facts.vocab // self._ranks)
        return self._gemm(
            self._facts.hidden, outputs, kind=CostClass.LM_HEAD, when="sampled_rows"
        )

    def copy(self, size: int, when: str) -> Operator:
        """A snapshot that is read and written once, all layers in one kernel."""
        return Operator(
            kind=CostClass.SNAPSHOT, count=1, when=when, bytes_per_unit=2.0 * size
        )

    def _gemm(
        self,
        inputs: float,
        outputs: float,
        kind: CostClass = CostClass.GEMM,
        when: str = "tokens",
    ) -> Operator:
        return Operator(
            kind=kind,
            count=1,
            when=when,
            flops_per_unit=2.0 * inputs * outputs,
            bytes_per_unit=ACTIVATION_BYTES * float(inputs + outputs),
            fixed_bytes=float(self._weight * inputs * outputs),
            shape=(round(inputs), round(outputs)),
        )

    def _elementwise(self, width: float, ranks: int | None = None) -> Operator:
        """`width` elements read or written for every token."""
        share = width / (self._ranks if ranks is None else ranks)
        return Operator(
            kind=CostClass.ELEMENTWISE,
            count=1,
            when="tokens",
            bytes_per_unit=ACTIVATION_BYTES * share,
        )

    def _reduction(self) -> Operator:
        """All-reduce of the stream over a ring: each link carries 2 (n - 1) / n."""
        share = 2.0 * (self._ranks - 1) / self._ranks
        return Operator(
            kind=CostClass.COLLECTIVE,
            count=1,
            when="tokens",
            bytes_per_unit=share * ACTIVATION_BYTES * self._facts.hidden,
        )

    def _scores(
        self, prefill: float, decode: float, kv_elements: float, streamed: float
    ) -> Iterator[Operator]:
        """Scores and values: FLOPs of a pair in prefill and in decode.

        `streamed` is the width of queries, keys, values and results of a token.
        """
        kv = kv_elements * self._types.bytes_of("kv")
        yield Operator(
            kind=CostClass.ATTENTION_PREFILL,
            count=1,
            when="token_pairs",
            flops_per_unit=prefill / self._ranks,
            stream_bytes=ACTIVATION_BYTES * streamed,
        )
        yield Operator(
            kind=CostClass.ATTENTION_DECODE,
            count=1,
            when="context_tokens",
            flops_per_unit=decode / self._ranks,
            bytes_per_unit=kv,
        )

    def _attention(self, layer: LayerShape) -> Iterator[Operator]:
        heads, hidden = self._facts.num_heads, self._facts.hidden
        head_dim = layer.kv_elements // (2 * layer.num_kv_heads)
        queries = heads * head_dim
        # All but the output product; with an output gate, or a wider input, more.
        first = layer.num_params - queries * hidden
        wide = (
            2 * hidden
            if first % (queries + layer.kv_elements) == 0
            and (first // (queries + layer.kv_elements) == 2 * hidden)
            else hidden
        )
        held = max(layer.num_kv_heads / self._ranks, 1.0) / layer.num_kv_heads
        kv = layer.kv_elements * held
        outputs = (first / wide - layer.kv_elements) / self._ranks + kv
        yield self._gemm(wide, outputs)
        yield self._gemm(queries / self._ranks, hidden)
        yield self._elementwise(2 * (queries + layer.kv_elements))
        streamed = 2 * queries / self._ranks + kv
        yield from self._scores(4.0 * queries, 4.0 * queries, kv, streamed)

    def _latent(self, layer: LayerShape) -> Iterator[Operator]:
        heads, hidden = self._facts.num_heads, self._facts.hidden
        rank, rope, nope, value = self._facts.latent
        yield self._gemm(hidden, heads * (nope + rope) / self._ranks + rank + rope)
        yield self._gemm(rank, heads * (nope + value) / self._ranks)
        yield self._gemm(heads * value / self._ranks, hidden)
        yield self._elementwise(2 * heads * (nope + rope))
        # Prefill expands the latent vector; decode works on it as it is.
        yield from self._scores(
            2.0 * heads * (nope + rope + value),
            2.0 * heads * (2 * rank + rope),
            layer.kv_elements,
            2 * heads * (nope + rope + value) / self._ranks,
        )

    def _recurrent(
        self, layer: LayerShape, prefill_flops: float, decode_flops: float, width: float
    ) -> Iterator[Operator]:
        """Convolution, scan of a prefill, update of a decode."""
        state = layer.state_elements * self._types.bytes_of("state") / self._ranks
        conv = layer.conv_elements * self._types.bytes_of("conv") / self._ranks
        chunk = max(self._facts.scan_chunk, 1)
        yield self._elementwise(2 * layer.conv_channels)
        yield Operator(
            kind=CostClass.SCAN,
            count=1,
            when="prefill_tokens",
            flops_per_unit=prefill_flops / self._ranks,
            # States between chunks are written and read in float32.
            bytes_per_unit=ACTIVATION_BYTES * width / self._ranks
            + (8.0 * layer.state_elements / self._ranks / chunk if chunk > 1 else 0),
        )
        yield Operator(
            kind=CostClass.STATE_UPDATE,
            count=1,
            when="decode_rows",
            flops_per_unit=decode_flops / self._ranks,
            bytes_per_unit=2.0 * (state + conv),
        )

    def _mamba2(self, layer: LayerShape) -> Iterator[Operator]:
        hidden, heads = self._facts.hidden, layer.num_state_heads
        inner, groups_state = mamba2_widths(layer, hidden)
        chunk = self._facts.scan_chunk
        channels = layer.conv_channels
        yield self._gemm(hidden, (inner + channels + heads) / self._ranks)
        yield self._gemm(inner / self._ranks, hidden)
        yield from self._recurrent(
            layer,
            2.0 * chunk * (groups_state + inner) + 4.0 * layer.state_elements,
            6.0 * layer.state_elements,
            2 * (inner + channels + heads) + inner,
        )
        yield self._elementwise(3 * inner)

    def _mamba1(self, layer: LayerShape) -> Iterator[Operator]:
        hidden, inner = self._facts.hidden, layer.conv_channels
        state = layer.state_elements // inner
        conv = layer.conv_elements // inner + 1
        left = layer.num_params - inner * (3 * hidden + state + conv)
        low_rank = left // inner  # dt_rank twice and the state's two projections
        dt_rank = (low_rank - 2 * state) // 2
        yield self._gemm(hidden, 2 * inner / self._ranks)
        yield self._gemm(inner / self._ranks, dt_rank + 2 * state)
        yield self._gemm(dt_rank, inner / self._ranks)
        yield self._gemm(inner / self._ranks, hidden)
        flops = 9.0 * layer.state_elements
        yield from self._recurrent(layer, flops, flops, 4 * inner + 2 * state)

    def _delta(self, layer: LayerShape) -> Iterator[Operator]:
        hidden, heads = self._facts.hidden, layer.num_state_heads
        # A state is key times value; the channels are q, k and v.
        values = _delta_values(layer)
        keys = (layer.conv_channels - values) // 2
        value = values // heads
        key = layer.state_elements // (heads * value)
        chunk = self._facts.scan_chunk
        conv = layer.conv_channels * (layer.conv_elements // layer.conv_channels + 1)
        first = (layer.num_params - conv - values * hidden) / hidden
        yield self._gemm(hidden, first / self._ranks)
        yield self._gemm(values / self._ranks, hidden)
        yield from self._recurrent(
            layer,
            heads * (2.0 * chunk * (2 * key + value) + 6.0 * key * value),
            8.0 * layer.state_elements,
            2 * keys + 2 * values + 2 * heads,
        )
        yield self._elementwise(3 * values)

    def _convolution(self, layer: LayerShape) -> Iterator[Operator]:
        hidden = self._facts.hidden
        yield self._gemm(hidden, 3 * hidden / self._ranks)
        yield self._gemm(hidden / self._ranks, hidden)
        yield self._elementwise(5 * hidden)

    def _mlp(self, layer: LayerShape) -> Iterator[Operator]:
        hidden = self._facts.hidden
        factor = 3 if self._facts.gated else 2
        inner = layer.num_params / hidden / factor / self._ranks
        yield self._gemm(hidden, inner * (factor - 1))
        yield self._gemm(inner, hidden)
        yield self._elementwise(factor * inner, ranks=1)

    def _experts(self, layer: LayerShape) -> Iterator[Operator]:
        facts = self._facts
        routed = facts.num_experts * facts.expert_params
        shared = layer.num_params - routed - facts.num_experts * facts.hidden
        yield self._gemm(facts.hidden, facts.num_experts)
        if shared > 2 * facts.hidden:
            yield self._gemm(facts.hidden, shared / facts.hidden / self._ranks)
        used = facts.experts_per_token * facts.expert_params / self._ranks
        yield Operator(
            kind=CostClass.EXPERTS,
            count=2,
            when="tokens",
            flops_per_unit=used,  # 2 FLOPs a weight, half of them in each kernel
            bytes_per_unit=ACTIVATION_BYTES
            * 1.5
            * facts.hidden
            * facts.experts_per_token,
            fixed_bytes=self._weight * routed / self._ranks / 2,
            experts=(facts.num_experts, facts.experts_per_token),
        )


def mamba2_widths(layer: LayerShape, hidden: int) -> tuple[int, int]:
    """Inner width, and groups times state, from what a Mamba-2 layer stores."""
    channels = layer.conv_channels
    conv = layer.conv_elements // channels + 1
    weights = layer.num_params - channels * conv
    inner = (weights - hidden * (channels + layer.num_state_heads)) // (2 * hidden)
    return inner, (channels - inner) // 2


def _delta_values(layer: LayerShape) -> int:
    """Value heads times their width: heads are as wide as their keys."""
    width = round((layer.state_elements / layer.num_state_heads) ** 0.5)
    return layer.num_state_heads * width
