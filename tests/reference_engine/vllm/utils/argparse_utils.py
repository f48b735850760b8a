"""vLLM's parser, as far as it is asked."""

from argparse import ArgumentParser as FlexibleArgumentParser  # noqa: F401
