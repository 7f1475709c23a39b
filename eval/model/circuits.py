"""Initial weights of the shipped checkpoint: heads that look back, and heads that find repeated text.

Copying heads form in training, but remain imprecise on a small budget: free-running copies fail after some dozens of
bytes. So they are constructed, after induction heads (Olsson et al., arXiv 2209.11895), and training continues from
there. Width 288 holds the byte in 64 channels, short codes of the eight bytes before it in 8 x 16, and hashes
of the eight bytes from 8, 16 and 24 back in 6 x 16.

- Layer 0 looks 1 to 8 bytes back and stores their codes.
- Layer 1 looks 8, 16 and 24 bytes back and fetches a hash of the eight bytes that precede there: for keys, one later.
- Layer 2 finds the position whose preceding 16 to 32 bytes match the current ones, and copies the byte found there.
- Layer 3 and the feed-forward layers of 2 and 3 start with small random weights. Layers 0 and 1 have none: their output
  would change how RMSNorm scales a key, and the longer of two keys would win over the matching one.

RoPE's theta is so large that most channels hardly rotate within the context: they compare content at any distance. The
few that rotate distinguish neighbours.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody does
from transformers import LlamaConfig, LlamaForCausalLM

THETA = 1e16
BYTE, CODE = 64, 16  # channels of the byte itself, and of each code
BACK = 8  # bytes that layer 0 looks back
HOPS = (8, 16, 24)  # bytes that layer 1 looks back
WIDTH = BYTE + CODE * (BACK + 2 * len(HOPS))
TURNING = 8  # pairs of channels by which heads look back
SHARPNESS = 10.0  # of looking back
# Attention logits of each KV head of layer 2 for a byte that matches, and for a hash from each hop back. A match
# of 16 bytes is found by the first alone, one of 32 by all; the others distinguish similar positions.
LOGITS = ((2.5, 16.0, 0.0, 0.0), (3.0, 14.0, 8.0, 0.0), (3.5, 10.0, 10.0, 10.0), (3.5, 10.0, 10.0, 10.0))
COPY = 8.0  # weight of a byte that was found, against that of the byte which stands here
# Factor of each KV head's COPY after training. Where heads differ, the longer match is
# right; and on text unlike the training text the language part errs more than training had it expect.
LOUDER = (1.0, 1.2, 1.5, 1.5)


def _slot(back: int) -> slice:
    """Channels with the code of the byte `back` before, 1 to BACK."""
    return slice(BYTE + CODE * (back - 1), BYTE + CODE * back)


def _hash(hop: int, query: bool) -> slice:
    """Channels with the hash that layer 1 fetches from `hop` back, as queries or as keys need it."""
    first = BYTE + CODE * (BACK + HOPS.index(hop) + (len(HOPS) if query else 0))
    return slice(first, first + CODE)


@torch.no_grad()
def write_circuits(model: LlamaForCausalLM, seed: int) -> None:
    """Replace a fresh model's weights."""
    config, layers = model.config, model.model.layers
    draw = torch.Generator().manual_seed(seed)
    for layer in layers:
        for projection in (getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"):
            projection.weight.normal_(0, 0.01, generator=draw)
        layer.mlp.down_proj.weight.mul_(0.25)
    for layer in layers[:2]:
        layer.mlp.down_proj.weight.zero_()
    codes = _codes(config.vocab_size, draw)
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        weight.zero_()[:, :BYTE] = codes
    model.model.norm.weight.fill_(0.1)
    _write_layer_0(layers[0].self_attn, config)
    _write_layer_1(layers[1].self_attn, config, draw)
    _write_layer_2(layers[2].self_attn, config, draw)


@torch.no_grad()
def make_louder(model: LlamaForCausalLM) -> None:
    """Multiply the weight of layer 2's matches by LOUDER."""
    out = _views(model.model.layers[2].self_attn, model.config)[3]
    out *= torch.tensor(LOUDER, device=out.device).repeat_interleave(out.shape[1] // len(LOUDER))[:, None]


def _write_layer_0(attention: torch.nn.Module, config: LlamaConfig) -> None:
    value, out = _views(attention, config)[2:]
    value[:, :CODE, :CODE] = torch.eye(CODE) * _scale(BYTE)
    for head in range(BACK):
        _look_back(attention, config, head, head + 1)
        out[_slot(head + 1), head, :CODE] = torch.eye(CODE)


def _write_layer_1(attention: torch.nn.Module, config: LlamaConfig, draw: torch.Generator) -> None:
    value, out = _views(attention, config)[2:]
    mixes = [_mix(CODE, draw) / math.sqrt(BACK) for _ in range(BACK)]
    group = config.num_attention_heads // config.num_key_value_heads
    for head, hop in enumerate(HOPS):
        _look_back(attention, config, head, hop)
        for query in (False, True):
            at = slice(CODE * query, CODE * (query + 1))
            value[head // group, at] = _gram(mixes, query) * _scale(BYTE + CODE * BACK)
            out[_hash(hop, query), head, at] = torch.eye(CODE)


def _write_layer_2(attention: torch.nn.Module, config: LlamaConfig, draw: torch.Generator) -> None:
    queries, keys, values, out = _views(attention, config)
    half = config.head_dim // 2
    still = torch.tensor([i for i in range(half) if THETA ** (-i / half) * config.max_position_embeddings < 0.6])
    still = torch.cat([still, still + half])
    heads, group = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
    unit = config.head_dim**0.25 / math.sqrt(CODE)
    for kv, (near, *far) in enumerate(LOGITS):
        mixes = [_mix(len(still), draw) * unit * math.sqrt(near) for _ in range(BACK)]
        key, query = _gram(mixes, False), _gram(mixes, True)
        for hop, logit in zip(HOPS, far, strict=True):
            key[:, _hash(hop, False)] = query[:, _hash(hop, True)] = _mix(len(still), draw) * unit * math.sqrt(logit)
        keys[kv, still] = key
        values[kv, :, :BYTE] = torch.eye(BYTE)
        for head in range(group * kv, group * (kv + 1)):
            queries[head, still] = query
            out[:BYTE, head] = torch.eye(BYTE) * COPY / heads


def _views(attention: torch.nn.Module, config: LlamaConfig) -> list[torch.Tensor]:
    """Weights of q, k and v as (heads, head_dim, width), of the output as (width, heads, head_dim)."""
    d, width = config.head_dim, config.hidden_size
    q, k, v = (attention.get_submodule(f"{name}_proj").get_parameter("weight").view(-1, d, width) for name in "qkv")
    return [q, k, v, attention.get_submodule("o_proj").get_parameter("weight").view(width, -1, d)]


def _look_back(attention: torch.nn.Module, config: LlamaConfig, head: int, offset: int) -> None:
    """Make a head attend `offset` positions back, regardless of content: biases that RoPE rotates into each other."""
    half, kv = config.head_dim // 2, head * config.num_key_value_heads // config.num_attention_heads
    angles = offset * THETA ** (-torch.arange(TURNING) / half)
    q, k = (attention.get_submodule(f"{name}_proj").get_parameter("bias").view(-1, 2, half) for name in "qk")
    k[kv, 0, :TURNING] = SHARPNESS
    q[head, 0, :TURNING], q[head, 1, :TURNING] = SHARPNESS * angles.cos(), -SHARPNESS * angles.sin()


def _gram(mixes: list[torch.Tensor], query: bool) -> torch.Tensor:
    """Sum over eight bytes, each with its own mixing matrix: those before a key, or those that end with the query's
    byte.
    """
    whole = torch.zeros(mixes[0].shape[0], WIDTH)
    for back, mix in enumerate(mixes, start=0 if query else 1):
        whole[:, slice(CODE) if back == 0 else _slot(back)] = mix
    return whole


def _mix(channels: int, draw: torch.Generator) -> torch.Tensor:
    """Random rotation of a code into `channels`: columns are orthogonal, so that all codes keep equal length."""
    turn: torch.Tensor = torch.linalg.qr(torch.randn(channels, CODE, generator=draw))[0]
    return turn


def _scale(channels: int) -> float:
    """Factor that undoes RMSNorm if `channels` of the width are in use, with values around 1."""
    return math.sqrt(channels / WIDTH)


def _codes(count: int, draw: torch.Generator) -> torch.Tensor:
    """Codes (count, BYTE) with large distances, both in the first CODE channels and in the others."""
    with torch.enable_grad():
        codes = torch.randn(count, BYTE, generator=draw).requires_grad_()
        optimizer = torch.optim.Adam([codes], 0.02)
        for _ in range(300):
            parts = [F.normalize(part, dim=-1) for part in (codes[:, :CODE], codes[:, CODE:])]
            near = [(part @ part.T - 2 * torch.eye(count)).flatten() for part in parts]
            optimizer.zero_grad()
            torch.stack([torch.logsumexp(12 * distances, 0) for distances in near]).sum().backward()
            optimizer.step()
    short, long = (F.normalize(part, dim=-1) for part in (codes[:, :CODE], codes[:, CODE:]))
    return torch.cat([short * CODE**0.5, long * (BYTE - CODE) ** 0.5], 1).detach()
