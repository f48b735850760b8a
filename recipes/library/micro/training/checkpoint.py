"""Room recipes: writes the micro model's folder (weights, configuration, tokenizer) and reads it back."""

import json
from dataclasses import asdict
from pathlib import Path

from characters import CHARACTERS, SPECIALS
from nemotron import Model, Shape
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models


def config(shape: Shape) -> dict:
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        **asdict(shape),
        "num_hidden_layers": len(shape.hybrid_override_pattern),
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mamba_ssm_cache_dtype": "float32",
        "expand": shape.mamba_num_heads * shape.mamba_head_dim // shape.hidden_size,
        "time_step_min": 0.0,
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
        "mlp_bias": False,
        "attention_bias": False,
        "residual_in_fp32": False,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }


def save_tokenizer(out: Path) -> None:
    """One token per character; nothing is added and nothing is cleaned up."""
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))  # noqa: S106
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,
            "model_max_length": 4096,
        },
    )


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def save(model: Model, out: Path) -> None:
    """The model folder, weights in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().bfloat16().cpu() for name, weight in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", config(Shape()))
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "do_sample": False,
        },
    )
    save_tokenizer(out)


def load(folder: Path, device: str) -> Model:
    """The model in a folder that save() wrote, in float32."""
    model = Model(Shape())
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.to(device)
