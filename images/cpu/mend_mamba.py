"""Room images: mends speculative decoding on vLLM 0.32's CPU engine for Mamba-2 hybrids; a vLLM plugin.

Runs inside the engine, in each of its processes, as a `vllm.general_plugins` entry point. Two of the CPU
build's operators are wrong for batches with draft tokens: `causal_conv1d_update` ignores
`num_accepted_tokens`, so the convolution never goes back to before a rejected draft, and
`selective_state_update` starts from the wrong state when more than one token was accepted. The text with
drafts then differs from the text without. Here both are written out in plain PyTorch, in float32. Batches
without drafts keep the engine's own kernels. A third fault, of types, is mended too (`use_one_dtype`).
VLLM_PLUGINS= (empty) turns all of this off and shows the difference.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor


def token_grid(bounds: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens of each request as a grid (R, L): index into the batch, and whether the place is used.

    `bounds` (R + 1) are the requests' starts in the batch; unused places repeat a request's last token.
    """
    lengths = bounds[1:] - bounds[:-1]
    steps = torch.arange(int(lengths.max()), device=device)
    used = steps < lengths[:, None]
    return bounds[:-1, None] + torch.minimum(steps, lengths[:, None] - 1), used


def conv_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    num_accepted_tokens: Tensor,
    query_start_loc: Tensor,
    **_: object,
) -> Tensor:
    """Mamba's convolution over one target token and its drafts per request.

    x (T, C); conv_state (slots, C, K - 1 + drafts), weight (C, K); returns (T, C). A request's state begins
    with the window before its first token of the last round; the tokens accepted then say how far to move.
    """
    history = weight.shape[1] - 1
    tokens, used = token_grid(query_start_loc.long(), x.device)
    slots = (conv_state_indices[:, 0] if conv_state_indices.dim() == 2 else conv_state_indices).long()
    places = (num_accepted_tokens.long() - 1)[:, None] + torch.arange(history, device=x.device)
    past = conv_state[slots].gather(2, places[:, None, :].expand(-1, conv_state.shape[1], -1))
    window = torch.cat([past.float(), x[tokens].transpose(1, 2).float()], 2)
    length = tokens.shape[1]
    mixed = sum(weight[:, k].float()[:, None] * window[:, :, k : k + length] for k in range(history + 1))
    if bias is not None:
        mixed = mixed + bias.float()[:, None]
    if activation in ("silu", "swish", True):
        mixed = F.silu(mixed)
    conv_state[slots, :, : history + length - 1] = window[:, :, 1:].to(conv_state.dtype)
    out = torch.zeros_like(x)
    out[tokens[used]] = mixed.transpose(1, 2)[used].to(x.dtype)
    return out


def state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    *,
    state_batch_indices: Tensor,
    out: Tensor,
    num_accepted_tokens: Tensor,
    cu_seqlens: Tensor,
    **_: object,
) -> None:
    """Mamba-2's state over one target token and its drafts per request; writes `out` and `state`.

    state (slots, H, P, N); x (T, H, P); b, c (T, G, N). dt (T, H, P), a (H, P, N), d and dt_bias (H, P) come
    expanded: Mamba-2 has one value a head. A request has a slot per token; it starts from the state in the
    slot of the token accepted last.
    """
    tokens, used = token_grid(cu_seqlens.long(), x.device)
    slots = state_batch_indices.long()
    rows, (_, heads, width) = torch.arange(len(slots), device=x.device), x.shape
    current = state[slots[rows, num_accepted_tokens.long() - 1]].float().view(-1, width, state.shape[-1])
    pace = F.softplus(dt[..., 0].float() + dt_bias[:, 0].float())  # (T, H)
    decay = torch.exp(pace * a[:, 0, 0].float())
    inflow = pace[..., None] * x.float()
    b_heads, c_heads = (each.float().repeat_interleave(heads // b.shape[1], 1) for each in (b, c))
    for step in range(tokens.shape[1]):
        token, alive = tokens[:, step], used[:, step]
        current.mul_(decay[token].view(-1, 1, 1))
        current.baddbmm_(inflow[token].view(-1, width, 1), b_heads[token].view(current.shape[0], 1, -1))
        result = torch.bmm(current, c_heads[token].view(current.shape[0], -1, 1)).view(-1, heads, width)
        result += d[:, :1].float() * x[token].float()
        out[token[alive]] = result[alive].to(out.dtype)
        state[slots[alive, step]] = current.view(-1, heads, width, state.shape[-1])[alive].to(state.dtype)


def use_one_dtype(layer: type) -> None:
    """Give the MTP layer's input projection the type the engine serves in.

    vLLM takes the configuration's type instead, whatever --dtype says, and the drafts' hidden states are NaN.
    """
    own = layer.__init__

    def init(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        own(self, *args, **kwargs)
        if hasattr(self, "eh_proj"):
            self.eh_proj.to(torch.get_default_dtype())

    layer.__init__ = init


def use_operators(module: object) -> None:
    """Use the operators above in vLLM's Mamba-2 layer for batches with draft tokens."""
    for name, mended in (("causal_conv1d_update", conv_update), ("selective_state_update", state_update)):
        own = getattr(module, name)

        def either(*args: object, own: object = own, mended: object = mended, **kwargs: object) -> object:
            return (own if kwargs.get("num_accepted_tokens") is None else mended)(*args, **kwargs)

        setattr(module, name, either)


def register() -> None:
    """vLLM's plugin hook; vLLM calls it once in every process of its own."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.logger import init_logger
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.models import nemotron_h_mtp

    use_operators(mamba_mixer2)
    use_one_dtype(nemotron_h_mtp.NemotronHMTPAttentionDecoderLayer)
    init_logger("vllm.station_recipes").info("Speculative decoding for Mamba-2 hybrids on a CPU is mended.")
