"""A closed-loop streaming client that writes what `vllm bench serve --save-detailed` writes."""

import argparse
import asyncio
import json
import time
from pathlib import Path

import httpx


async def benchmark(args: argparse.Namespace) -> None:
    """Send the prompts, `max_concurrency` at a time, and save the result."""
    lines = Path(args.dataset_path).read_text().splitlines()
    gate = asyncio.Semaphore(args.max_concurrency)
    limits = httpx.Limits(max_connections=args.max_concurrency)
    async with httpx.AsyncClient(base_url=args.base_url, timeout=None, limits=limits, trust_env=False) as client:
        found = await asyncio.gather(*(_ask(client, gate, args, json.loads(line)) for line in lines))
    result = {key: [each[key] for each in found] for key in found[0]}
    (Path(args.result_dir) / args.result_filename).write_text(json.dumps(result))


async def _ask(client: httpx.AsyncClient, gate: asyncio.Semaphore, args: argparse.Namespace, line: dict) -> dict:
    body = {"model": args.model, "prompt": line["prompt"], "max_tokens": args.custom_output_len, "ignore_eos": True}
    body |= {"temperature": args.temperature, "stream": True, "stream_options": {"include_usage": True}}
    async with gate:
        began = last = time.perf_counter()
        times, text, usage, error = [], "", {}, ""
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for raw in answer.aiter_lines():
                    if not raw.startswith("data: {"):
                        continue
                    event = json.loads(raw[6:])
                    usage = event.get("usage") or usage
                    if event.get("choices"):
                        now = time.perf_counter()
                        times.append(now - last)
                        last = now
                        text += event["choices"][0]["text"]
        except httpx.HTTPError as problem:
            error = f"{type(problem).__name__}: {problem}"
    return {
        "start_times": began,
        "ttfts": times[0] if times else 0.0,
        "itls": times[1:],
        "latencies": last - began,
        "input_lens": usage.get("prompt_tokens", 0),
        "output_lens": usage.get("completion_tokens", 0),
        "errors": error,
        "generated_texts": text,
    }
