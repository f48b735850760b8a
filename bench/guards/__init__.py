"""Room bench: what voids a number. One guard a cause, each with observed value, limit, unit and source.

Every guard has the schema of runs it belongs to: a run is asked what its own schema promised to record, and is not
void for want of what nobody recorded then.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from bench.evidence import Evidence
from bench.guards import course, devices, record, requests, server
from bench.guards.guard import Guard, in_words, roots, with_causes

__all__ = ["CHECKS", "Guard", "in_words", "roots", "run_guards"]

# (schema of runs from which on it is asked, check), in the order of verdict.json.
CHECKS: tuple[tuple[int, Callable[[Evidence], Iterator[Guard]]], ...] = (
    (1, record.seal),
    (1, record.finished),
    (1, requests.completed),
    (1, requests.no_errors),
    (1, server.finish_counters),
    (1, requests.output_lengths),
    (1, server.generation_tokens),
    (1, server.prompt_tokens),
    (1, server.prefix_hits),
    (1, server.preemptions),
    (1, server.same_server),
    (1, record.engine_version),
    (1, record.live_settings),
    (1, record.log_proof),
    (1, record.quality_complete),
    (2, record.image_digest),
    (2, record.uninterrupted),
    (2, server.counter_gaps),
    (2, server.acceptance),
    (2, server.peak),
    (2, server.running),
    (2, server.little),
    (2, requests.straggler),
    (2, requests.degenerate_text),
    (2, requests.dispatch_delay),
    (2, course.cold_engine),
    (2, devices.client_saturation),
    (2, devices.telemetry_gaps),
    (2, devices.gpus),
)


def run_guards(evidence: Evidence) -> list[Guard]:
    """Every guard's finding for a run, waivers of the recipe applied."""
    waivers = {waiver.guard: waiver.reason for waiver in evidence.recipe.proof.waive}
    schema = evidence.manifest.schema_
    findings = [guard for since, check in CHECKS if since <= schema for guard in check(evidence)]
    return with_causes([replace(guard, waived=waivers.get(guard.id)) for guard in findings])
