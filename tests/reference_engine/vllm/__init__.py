"""The reference engine behind vLLM's names: `vllm serve`, `vllm bench serve` and its configuration, for tests of ladders.

Nothing here is vLLM's. A step's time and its accepted tokens follow from the flags, so that a ladder has a known
truth. What a recipe's environment says makes it lie in the ways that a real engine may: REFERENCE_FORCES=name=value
(overrides a setting), REFERENCE_DIES=text (ends at boot), REFERENCE_RESETS_STATE=1 (goes back to float32, and says so).
"""
