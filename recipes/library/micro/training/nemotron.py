"""Room recipes: the micro NemotronH model in PyTorch, for training and for text: main model and MTP layer."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

CHUNK = 64  # of the scan in training; the result does not depend on it
DRAFTS = 3


@dataclass(frozen=True)
class Shape:
    """The model's sizes, named as in config.json."""

    hybrid_override_pattern: str = "M*-M*-M*-M*-"
    mtp_hybrid_override_pattern: str = "*"
    num_nextn_predict_layers: int = 1
    vocab_size: int = 128
    hidden_size: int = 256
    intermediate_size: int = 1152
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    mamba_num_heads: int = 8
    mamba_head_dim: int = 64
    ssm_state_size: int = 128
    n_groups: int = 1
    conv_kernel: int = 4
    chunk_size: int = 128
    layer_norm_epsilon: float = 1e-5


def stored(weight: Tensor) -> Tensor:
    """The weight as the checkpoint stores it, rounded to bfloat16; the gradient passes through."""
    return weight + (weight.bfloat16().float() - weight).detach()


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, after an optional gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = x.float()
        if gate is not None:
            x = x * F.silu(gate.float())
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * stored(self.weight)


def linear(fan_in: int, fan_out: int, scale: float = 1.0) -> nn.Linear:
    """A projection without bias."""
    layer = nn.Linear(fan_in, fan_out, bias=False)
    nn.init.normal_(layer.weight, std=scale * fan_in**-0.5)
    return layer


class MLP(nn.Module):
    """Squared-ReLU MLP."""

    def __init__(self, shape: Shape, scale: float) -> None:
        super().__init__()
        self.up_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = linear(shape.intermediate_size, shape.hidden_size, scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())

    def step(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        return self(x)


class Attention(nn.Module):
    """Causal grouped-query attention without positions."""

    def __init__(self, shape: Shape, scale: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.q_proj = linear(shape.hidden_size, self.heads * self.head_dim)
        self.k_proj = linear(shape.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = linear(shape.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = linear(self.heads * self.head_dim, shape.hidden_size, scale)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (batch, heads, length, head_dim)."""
        projections = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        return q, k, v

    def merge(self, y: Tensor) -> Tensor:
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))

    def step(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        """One more position, given the keys and values of those before."""
        q, k, v = self.split(x)
        if cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        cache.update(k=k, v=v)
        return self.merge(F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


def scan(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba-2's state-space scan in chunks.

    x: (batch, length, heads, p), already times dt; log_decay: (batch, length, heads), dt times A;
    b, c: (batch, length, n), shared by the heads. The length is a multiple of CHUNK.
    """
    batch, length, heads, p = x.shape
    x, b, c = (t.unflatten(1, (-1, CHUNK)) for t in (x, b, c))
    total = log_decay.unflatten(1, (-1, CHUNK)).cumsum(2).permute(0, 3, 1, 2)  # batch, heads, chunks, q
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()
    inside = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    scores = (c @ b.transpose(-1, -2))[:, None] * inside.to(c.dtype)  # batch, heads, chunks, q, s
    local = scores @ x.permute(0, 3, 1, 2, 4)

    to_end = (total[..., -1:] - total).exp().permute(0, 2, 3, 1)[..., None]
    states = b.transpose(-1, -2) @ (x * to_end.to(x.dtype)).flatten(3)  # batch, chunks, n, heads * p
    states = states.unflatten(-1, (heads, p)).permute(0, 3, 1, 2, 4).flatten(3).float()
    ends = F.pad(total[..., -1].cumsum(-1), (1, 0))
    chunks = ends.shape[-1] - 1
    gap = ends[..., :-1, None] - ends[..., None, 1:]
    before = torch.ones(chunks, chunks, dtype=torch.bool, device=x.device).tril(-1)
    carry = gap.masked_fill(~before, -torch.inf).exp()
    with torch.autocast(x.device.type, enabled=False):
        starts = carry @ states  # batch, heads, chunks, n * p: the state before each chunk
    starts = starts.unflatten(-1, (-1, p)).permute(0, 2, 3, 1, 4).flatten(3).to(c.dtype)
    carried = (c @ starts).unflatten(-1, (heads, p)) * total.exp().permute(0, 2, 3, 1)[..., None]
    return (local.permute(0, 2, 3, 1, 4) + carried).reshape(batch, length, heads, p)


class Mamba(nn.Module):
    """Mamba-2 mixer with one group."""

    def __init__(self, shape: Shape, scale: float) -> None:
        super().__init__()
        self.heads, self.p, self.n = shape.mamba_num_heads, shape.mamba_head_dim, shape.ssm_state_size
        inner = self.heads * self.p
        self.sizes = (inner, inner + 2 * self.n, self.heads)
        self.in_proj = linear(shape.hidden_size, sum(self.sizes))
        self.conv1d = nn.Conv1d(self.sizes[1], self.sizes[1], shape.conv_kernel, groups=self.sizes[1])
        dt = torch.logspace(-3, -1, self.heads)
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.arange(1, self.heads + 1).float().log())
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm = RMSNorm(inner, shape.layer_norm_epsilon)
        self.out_proj = linear(inner, shape.hidden_size, scale)

    def convolve(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Causal convolution over the length; the first kernel - 1 positions only give context."""
        weight = stored(self.conv1d.weight).squeeze(1)
        length = xbc.shape[1] - weight.shape[1] + 1
        y = sum(xbc[:, k : k + length] * weight[:, k] for k in range(weight.shape[1]))
        y = F.silu(y + stored(self.conv1d.bias)).to(xbc.dtype)
        x, b, c = y.split([self.sizes[0], self.n, self.n], -1)
        return x.unflatten(-1, (self.heads, self.p)), b, c

    def discretise(self, dt: Tensor) -> tuple[Tensor, Tensor]:
        """dt and dt times A, in float32."""
        dt = F.softplus(dt.float() + stored(self.dt_bias))
        return dt, -dt * stored(self.A_log).exp()

    def output(self, y: Tensor, x: Tensor, z: Tensor) -> Tensor:
        y = y + x * stored(self.D)[:, None]
        return self.out_proj(self.norm(y.flatten(-2), z))

    def forward(self, u: Tensor) -> Tensor:
        z, xbc, dt = self.in_proj(u).split(self.sizes, -1)
        x, b, c = self.convolve(F.pad(xbc, (0, 0, self.conv1d.kernel_size[0] - 1, 0)))
        dt, log_decay = self.discretise(dt)
        return self.output(scan((x * dt[..., None]).to(x.dtype), log_decay, b, c), x, z)

    def step(self, u: Tensor, cache: dict[str, Tensor]) -> Tensor:
        """One more position, given the convolution's window and the state."""
        z, xbc, dt = self.in_proj(u).split(self.sizes, -1)
        if not cache:
            cache["window"] = xbc.new_zeros(len(u), self.conv1d.kernel_size[0] - 1, xbc.shape[-1])
            cache["state"] = torch.zeros(len(u), self.heads, self.p, self.n, device=u.device)
        window = torch.cat([cache["window"], xbc], 1)
        x, b, c = self.convolve(window)
        dt, log_decay = self.discretise(dt[:, 0])
        state = cache["state"] * log_decay.exp()[..., None, None]
        state = state + (x[:, 0] * dt[..., None])[..., None].float() * b[:, :, None].float()
        cache.update(window=window[:, 1:], state=state)
        return self.output((state * c[:, :, None].float()).sum(-1)[:, None], x, z)


MIXERS = {"M": Mamba, "*": Attention, "-": MLP}


class Block(nn.Module):
    """Norm, mixer, residual."""

    def __init__(self, kind: str, shape: Shape) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.hidden_size, shape.layer_norm_epsilon)
        self.mixer = MIXERS[kind](shape, scale=len(shape.hybrid_override_pattern) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))

    def step(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        return x + self.mixer.step(self.norm(x), cache)


class MTPLayer(Block):
    """Drafts token t+2 from the hidden state of position t and the embedding of token t+1."""

    def __init__(self, shape: Shape) -> None:
        super().__init__("*", shape)
        self.enorm, self.hnorm, self.final_layernorm = (
            RMSNorm(shape.hidden_size, shape.layer_norm_epsilon) for _ in range(3)
        )
        self.eh_proj = linear(2 * shape.hidden_size, shape.hidden_size)

    def fuse(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1)).float()

    def forward(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first draft step at every position: output, keys and values."""
        x = self.fuse(embedded, hidden)
        q, k, v = self.mixer.split(self.norm(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.final_layernorm(x + self.mixer.merge(y)), k, v

    def again(
        self, embedded: Tensor, hidden: Tensor, keys: list[Tensor], values: list[Tensor], future: Tensor
    ) -> Tensor:
        """A further draft step from several starts at once.

        keys[0] and values[0] are the first step's, of all positions; `future` (batch, starts, length) marks
        those after each start. The other entries are this chain's own, one per start; this step adds its.
        """
        x = self.fuse(embedded, hidden)
        q, k, v = self.mixer.split(self.norm(x))
        keys.append(k)
        values.append(v)
        q = q.unflatten(1, (k.shape[1], -1)) * self.mixer.head_dim**-0.5  # batch, kv, group, starts, dim
        past = (q @ keys[0][:, :, None].transpose(-1, -2)).float()
        past = past.masked_fill(future[:, None, None], -torch.inf)
        own = [(q * key[:, :, None]).sum(-1, keepdim=True).float() for key in keys[1:]]
        share = torch.cat([past, *own], -1).softmax(-1).to(v.dtype)
        past, *own = share.split([past.shape[-1], *(1 for _ in own)], -1)
        y = past @ values[0][:, :, None]
        y = y + sum(part * value[:, :, None] for part, value in zip(own, values[1:], strict=True))
        return self.final_layernorm(x + self.mixer.merge(y.flatten(1, 2)))


class Model(nn.Module):
    """The whole model; parameter names are the checkpoint's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        layers = nn.ModuleList(Block(kind, shape) for kind in shape.hybrid_override_pattern)
        self.backbone = nn.ModuleDict(
            {
                "embeddings": nn.Embedding(shape.vocab_size, shape.hidden_size),
                "layers": layers,
                "norm_f": RMSNorm(shape.hidden_size, shape.layer_norm_epsilon),
            }
        )
        nn.init.normal_(self.backbone["embeddings"].weight, std=0.1)
        self.lm_head = linear(shape.hidden_size, shape.vocab_size, 0.5)
        self.mtp = nn.ModuleDict({"layers": nn.ModuleList([MTPLayer(shape)])})

    @property
    def drafter(self) -> MTPLayer:
        return self.mtp["layers"][0]

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, stored(self.backbone["embeddings"].weight))

    def hidden(self, tokens: Tensor) -> Tensor:
        """The final hidden states of all positions (after norm_f)."""
        length = tokens.shape[1]
        x = self.embed(F.pad(tokens, (0, -length % CHUNK)))
        for layer in self.backbone["layers"]:
            x = layer(x)
        return self.backbone["norm_f"](x)[:, :length]

    def step(self, tokens: Tensor, caches: list[dict[str, Tensor]]) -> Tensor:
        """The logits after one more token per row."""
        x = self.embed(tokens)[:, None]
        for layer, cache in zip(self.backbone["layers"], caches, strict=True):
            x = layer.step(x, cache)
        return self.lm_head(self.backbone["norm_f"](x))[:, 0]

    def drafts(self, tokens: Tensor, hidden: Tensor, starts: Tensor) -> list[Tensor]:
        """Logits of draft steps 1 to 3, fed with the true tokens.

        Step 1 is given for all positions t < length - 1 and predicts token t+2. Steps 2 and 3 are given for
        the starts (batch, starts) and predict tokens t+3 and t+4; t is below length - DRAFTS.
        """
        embedded = self.embed(tokens)
        first, k, v = self.drafter(embedded[:, 1:], hidden[:, :-1])
        logits, keys, values = [self.lm_head(first)], [k], [v]
        future = torch.arange(first.shape[1], device=tokens.device) > starts[..., None]
        state = pick(first, starts)
        for ahead in range(2, DRAFTS + 1):
            state = self.drafter.again(pick(embedded, starts + ahead), state, keys, values, future)
            logits.append(self.lm_head(state))
        return logits


def pick(x: Tensor, positions: Tensor) -> Tensor:
    """The rows of x (batch, length, size) at these positions (batch, n)."""
    return x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))


@torch.no_grad()
def greedy(model: Model, prompts: Tensor, new: int) -> Tensor:
    """The prompts (all of one length) and the model's `new` most likely next tokens."""
    tokens, caches = prompts.T.contiguous(), [{} for _ in model.backbone["layers"]]
    rows = list(tokens)
    for position in range(len(rows) + new - 1):
        logits = model.step(rows[position], caches)
        if position >= len(tokens) - 1:
            rows.append(logits.argmax(-1))
    return torch.stack(rows, 1)
