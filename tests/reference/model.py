"""A transformer over a full cache of which each KV head may see some rows only.

`Reference` keeps every row that it ever computed. Evicting is a mask here (`keep`), on purpose:
what edgekv does by moving bytes must equal this. Rows are float32 values as the cache type gives
them back (cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from .cache import QUANTISED, round_keys, round_queries, round_values
from .weights import Weights, load

NEOX = ("qwen2", "qwen3", "gemma3", "phi3")  # rotate (i, i + d/2); llama rotates (2i, 2i + 1)
ALIBI = ("refact",)  # no rotation: scores fall with distance
QUERY_CHUNK = 256
CENTRE_POSITIONS = 8192
Rows = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, [n_head_kv, n_rows, d_head]."""


@dataclass
class LayerCache:
    """All rows of one layer: k, v float32 [n_head_kv, n_rows, d_head], pos int64 [n_rows], visible
    bool [n_head_kv, n_rows].
    """

    k: torch.Tensor
    v: torch.Tensor
    pos: torch.Tensor
    visible: torch.Tensor


@dataclass
class LayerPass:
    """What one layer did with the tokens of one call.

    q: [n_head, n_tokens, d_head] after RoPE, raw_q: the same before; attention: probabilities
    [n_head_kv, G, n_observe, n_rows] of the last n_observe tokens; col_sum: [n_head_kv, n_rows],
    the column sums over all tokens, mean over the G heads.
    """

    q: torch.Tensor
    raw_q: torch.Tensor
    attention: torch.Tensor
    col_sum: torch.Tensor


@dataclass
class Pass:
    """logits: [n_tokens, n_vocab] (or [1, n_vocab]); layers: one LayerPass each."""

    logits: torch.Tensor
    layers: list[LayerPass] = field(default_factory=list)


class Reference:
    """One conversation with one model.

    type_k, type_v: cache types that rows are stored in; a prompt, too, attends to them as stored.
    rounded_queries: round queries as ggml's own CPU attention does before quantised keys (see
    cache.round_queries). whole_keys: store quantised keys as they are, as llama.cpp does.
    late: rows of quantised types are f16 until `keep` rounds them; new rows behind it stay so, but
    for those of windows.
    """

    def __init__(
        self,
        model: Path | str | Weights,
        type_k: str = "f16",
        type_v: str = "f16",
        rounded_queries: bool = False,
        whole_keys: bool = False,
        late: bool = False,
    ):
        self.weights = model if isinstance(model, Weights) else load(model)
        self.type_k, self.type_v, self.rounded_queries = type_k, type_v, rounded_queries
        self.whole_keys = whole_keys
        self.late = late
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.has_kept = False
        shape = (self.weights.n_head_kv, 0, self.weights.d_head)
        self.layers = [
            LayerCache(
                torch.zeros(shape),
                torch.zeros(shape),
                torch.zeros(0, dtype=torch.int64),
                torch.zeros(shape[:2], dtype=torch.bool),
            )
            for _ in range(self.weights.n_layer)
        ]

    @torch.inference_mode()
    def prefill(
        self,
        tokens: Sequence[int],
        observe: int = 32,
        all_logits: bool = True,
        rows: Rows | None = None,
    ) -> Pass:
        """Read a prompt (or a later turn of many tokens) behind what is there.

        rows: K and V of each layer's new rows as edgekv stored them, instead of this model's own:
        what depends on values that round one way here and the other way there is then left out of a
        comparison.
        """
        return self._forward(tokens, observe, all_logits, rows)

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append the tokens one by one; logits [n_tokens, n_vocab] after each."""
        return torch.cat([self._forward((token,), 1, True).logits for token in tokens])

    @torch.inference_mode()
    def keep(self, rows: Sequence[Sequence[np.ndarray]]) -> None:
        """Let KV head k of layer il see only rows[il][k] (row indices, any order) of what is there;
        a layer without entries keeps all.
        """
        for il, (layer, heads) in enumerate(zip(self.layers, rows, strict=True)):
            if self.late:
                layer.k, layer.v = self._stored(il, layer.k, layer.v)
            visible = layer.visible.clone()
            for k, kept in enumerate(heads):
                mask = torch.zeros(visible.shape[1], dtype=torch.bool)
                mask[torch.as_tensor(np.asarray(kept, dtype=np.int64))] = True
                visible[k] &= mask
            layer.visible = visible
        self.has_kept = True

    def fork(self) -> Reference:
        """Another conversation that goes on from here: same weights, same rows."""
        other = Reference(
            self.weights, self.type_k, self.type_v, self.rounded_queries, self.whole_keys, self.late
        )
        other.has_kept = self.has_kept
        # tensors are never changed in place
        other.layers = [replace(layer) for layer in self.layers]
        return other

    def _forward(
        self, tokens: Sequence[int], observe: int, all_logits: bool, rows: Rows | None = None
    ) -> Pass:
        w = self.weights
        pos = torch.arange(len(tokens)) + len(self.layers[0].pos)
        x = w.tensors["token_embd.weight"][torch.as_tensor(tokens)]
        if w.arch == "gemma3":
            x = x * w.n_embd**0.5
        passes = []
        for il in range(w.n_layer):
            attended, layer_pass = self._attention(
                il, self._norm(x, w.get(il, "attn_norm.weight")), pos, observe, rows and rows[il]
            )
            x = x + self._post_norm(attended, il, "post_attention_norm.weight")
            x = x + self._post_norm(
                self._feed_forward(il, self._norm(x, w.get(il, "ffn_norm.weight"))),
                il,
                "post_ffw_norm.weight",
            )
            passes.append(layer_pass)
        x = self._norm(x if all_logits else x[-1:], w.tensors["output_norm.weight"])
        head = w.tensors.get("output.weight", w.tensors["token_embd.weight"])
        return Pass(x @ head.T, passes)

    def _attention(
        self,
        il: int,
        x: torch.Tensor,
        pos: torch.Tensor,
        observe: int,
        stored: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, LayerPass]:
        w, layer = self.weights, self.layers[il]
        raw_q, k, v = self._project(il, x)
        base = w.freq_base_swa if w.swa[il] else w.freq_base
        q, k = (
            part if w.arch in ALIBI else rope(part, pos, base, w.arch in NEOX)
            for part in (raw_q, k)
        )
        if self.late and not (self.has_kept and w.swa[il]):
            scale = self.scale(il)
            k, v = (k * scale).half().float() / scale, v.half().float()
        else:
            k, v = stored or self._stored(il, k, v)
        layer.k, layer.v = torch.cat([layer.k, k], 1), torch.cat([layer.v, v], 1)
        layer.pos = torch.cat([layer.pos, pos])
        layer.visible = torch.cat(
            [layer.visible, torch.ones(w.n_head_kv, len(pos), dtype=torch.bool)], 1
        )

        n_group, n_tokens = w.n_head // w.n_head_kv, len(pos)
        grouped = q.reshape(w.n_head_kv, n_group, n_tokens, w.d_head)
        if self.rounded_queries:
            scale = self.scale(il)[:, None]
            grouped = round_queries(grouped / scale, self.type_k) * scale
        col_sum = torch.zeros(layer.visible.shape)
        outputs, observed = [], []
        for first in range(0, n_tokens, QUERY_CHUNK):
            last = min(first + QUERY_CHUNK, n_tokens)
            probabilities = self._probabilities(il, grouped[:, :, first:last], pos[first:last])
            n_rows = probabilities.shape[-1]
            outputs.append(probabilities @ layer.v[:, None, :n_rows])
            col_sum[:, :n_rows] += probabilities.sum(2).mean(1)
            if last > n_tokens - observe:
                tail = probabilities[:, :, max(0, n_tokens - observe - first) :]
                observed.append(F.pad(tail, (0, col_sum.shape[1] - n_rows)))
        out = (
            torch.cat(outputs, 2)
            .reshape(w.n_head, n_tokens, w.d_head)
            .transpose(0, 1)
            .reshape(n_tokens, -1)
        )
        return out @ w.get(il, "attn_output.weight").T, LayerPass(
            q, raw_q, torch.cat(observed, 2), col_sum
        )

    def _stored(
        self, il: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows as the cache's types give them back."""
        centre, scale = self.centre(il), self.scale(il)
        rounded = round_keys((k - centre) * scale, self.type_k) / scale
        return rounded + centre, round_values(v, self.type_v)

    def centre(self, il: int) -> torch.Tensor:
        """[n_head_kv, 1, d_head]: the mean of the keys' bias over the first positions, which
        quantised rows are stored without.
        """
        w = self.weights
        bias = w.get(il, "attn_k.bias")
        if bias is None or self.whole_keys or self.type_k not in QUANTISED:
            return torch.zeros(w.n_head_kv, 1, w.d_head)
        base = w.freq_base_swa if w.swa[il] else w.freq_base
        heads = bias.reshape(w.n_head_kv, 1, w.d_head).expand(-1, CENTRE_POSITIONS, -1)
        turned = rope(heads, torch.arange(CENTRE_POSITIONS), base, w.arch in NEOX)
        return turned.double().mean(1, keepdim=True).float()

    def scale(self, il: int) -> torch.Tensor:
        """[n_head_kv, 1, d_head]: what keys are multiplied by before they are rounded, and queries
        divided by: (q / k) ** 0.5, with root mean squares of queries and keys as their norms or
        their biases have them.
        """
        w = self.weights
        of_keys, bias = w.get(il, "attn_k_norm.weight"), w.get(il, "attn_k.bias")
        if (of_keys is None and bias is None) or self.whole_keys or self.type_k not in QUANTISED:
            return torch.ones(w.n_head_kv, 1, w.d_head)
        if of_keys is not None:
            k = of_keys.expand(w.n_head_kv, -1) ** 2
            q = (w.get(il, "attn_q_norm.weight") ** 2).expand(w.n_head_kv, -1)
        else:
            heads = w.get(il, "attn_q.bias").reshape(w.n_head_kv, -1, w.d_head)
            k = 1 + bias.reshape(w.n_head_kv, -1) ** 2 - self.centre(il)[:, 0] ** 2
            q = 1 + (heads**2).mean(1)
        k, q = (_pairs_mean(x, w.arch in NEOX) for x in (k, q))
        log = (torch.log(q) - torch.log(k)) / 4
        return torch.exp(log - log.mean(-1, keepdim=True))[:, None]

    def _probabilities(self, il: int, q: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        """Softmax over the visible, causal rows: [n_head_kv, G, n_q, n_rows] for queries q
        [n_head_kv, G, n_q, d_head] at pos.
        """
        w, layer = self.weights, self.layers[il]
        # later rows are masked for every query of this chunk
        n_rows = int(torch.searchsorted(layer.pos, pos[-1], right=True))
        distance = pos[:, None] - layer.pos[None, :n_rows]
        allowed = (distance >= 0) & (
            (distance < w.n_swa) if w.swa[il] else torch.ones_like(distance, dtype=torch.bool)
        )
        allowed = allowed[None] & layer.visible[:, None, :n_rows]
        scores = q @ layer.k[:, None, :n_rows].transpose(-1, -2) / w.d_head**0.5
        if w.arch in ALIBI:
            scores -= alibi_slopes(w.n_head).reshape(w.n_head_kv, -1)[:, :, None, None] * distance
        return scores.masked_fill_(~allowed[:, None], -torch.inf).softmax(-1)

    def _project(self, il: int, x: torch.Tensor) -> list[torch.Tensor]:
        """q [n_head, n, d_head], k and v [n_head_kv, n, d_head] with biases and QK norm, before
        RoPE.
        """
        w = self.weights
        heads = {"q": w.n_head, "k": w.n_head_kv, "v": w.n_head_kv}
        fused = w.get(il, "attn_qkv.weight")
        matrices = (
            fused.split([n * w.d_head for n in heads.values()])
            if fused is not None
            else [w.get(il, f"attn_{part}.weight") for part in heads]
        )
        projected = []
        for (part, n_head), matrix in zip(heads.items(), matrices, strict=True):
            bias, norm = w.get(il, f"attn_{part}.bias"), w.get(il, f"attn_{part}_norm.weight")
            y = F.linear(x, matrix, bias).reshape(len(x), n_head, w.d_head)
            projected.append((y if norm is None else self._norm(y, norm)).transpose(0, 1))
        return projected

    def _feed_forward(self, il: int, x: torch.Tensor) -> torch.Tensor:
        w = self.weights
        gate, up = w.get(il, "ffn_gate.weight"), w.get(il, "ffn_up.weight")
        if gate is None:  # phi3 stacks gate and up in one matrix
            gate, up = up.chunk(2)
        activate = gelu if w.arch == "gemma3" else F.silu
        return (activate(x @ gate.T) * (x @ up.T)) @ w.get(il, "ffn_down.weight").T

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.weights.eps) * weight

    def _post_norm(self, x: torch.Tensor, il: int, part: str) -> torch.Tensor:
        weight = self.weights.get(il, part)
        return x if weight is None else self._norm(x, weight)


def alibi_slopes(n_head: int) -> torch.Tensor:
    """[n_head]: the paper's geometric sequence for a power of two; for other numbers every second
    one of the next power's follows.
    """
    power = 2 ** int(np.log2(n_head))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)] + [
        2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)
    ]
    return torch.tensor(slopes[:n_head])


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU as ggml's CPU backend looks it up: a table over f16 that holds f16."""
    return F.gelu(x.half().float(), approximate="tanh").half().float()


def _pairs_mean(x: torch.Tensor, neox: bool) -> torch.Tensor:
    """x [..., d_head] with the two values that positions turn together replaced by their mean."""
    pairs = x.unflatten(-1, (2, -1) if neox else (-1, 2))
    dim = -2 if neox else -1
    return pairs.mean(dim, keepdim=True).expand_as(pairs).flatten(-2)


def rope(x: torch.Tensor, pos: torch.Tensor, base: float, neox: bool) -> torch.Tensor:
    """Rotary positions on x [n_head, n_tokens, d_head] (Su et al., 2021), in either pairing."""
    d = x.shape[-1]
    frequencies = base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = pos.double()[:, None] * frequencies[None]
    cos, sin = angle.cos().float(), angle.sin().float()
    if neox:
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
