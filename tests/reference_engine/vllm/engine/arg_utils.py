"""What the flags resolve to: asynchronous scheduling is on unless refused, and a forced value wins."""

import argparse
import os
from types import SimpleNamespace


class AsyncEngineArgs:
    """The arguments of `serve`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "AsyncEngineArgs":
        """Take them in."""
        return cls(args)

    def create_engine_config(self, usage_context: object = None) -> SimpleNamespace:
        """The configuration, under vLLM's names."""
        args = self.args
        asked = args.async_scheduling
        values = {
            "async_scheduling": True if asked is None else asked,
            "mamba_ssm_cache_dtype": args.mamba_ssm_cache_dtype,
            "enable_prefix_caching": bool(args.enable_prefix_caching),
        }
        name, _, forced = os.environ.get("REFERENCE_FORCES", "").partition("=")
        if name:
            values[name] = {"true": True, "false": False}.get(forced, forced)
        drafts = args.speculative_config
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(
                async_scheduling=values["async_scheduling"], max_num_seqs=args.max_num_seqs or 256
            ),
            model_config=SimpleNamespace(dtype=args.dtype, enforce_eager=bool(args.enforce_eager)),
            cache_config=SimpleNamespace(
                enable_prefix_caching=values["enable_prefix_caching"],
                mamba_ssm_cache_dtype=values["mamba_ssm_cache_dtype"],
            ),
            mamba_config=SimpleNamespace(backend=args.mamba_backend),
            speculative_config=SimpleNamespace(**drafts) if drafts else None,
        )
