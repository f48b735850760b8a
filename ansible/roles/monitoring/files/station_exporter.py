#!/usr/bin/python3
"""What a host's GPUs and the cache's disk are doing, for Prometheus. Standard library only.

Each scrape asks nvidia-smi once (40 ms on an H200). A host without nvidia-smi has no GPU metrics; one where it fails
says station_gpu_query_ok 0. What the driver doesn't tell is left out, never 0.
"""

from __future__ import annotations

import argparse
import http.server
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

MIB, MHZ = 1024 * 1024, 1e6
# nvidia-smi's field: our metric, what it is, what to multiply with. All read on an H200, driver 580.159.04.
FIELDS = {
    "memory.total": ("station_gpu_memory_total_bytes", "GPU memory as the driver reports it.", MIB),
    "memory.used": ("station_gpu_memory_used_bytes", "GPU memory in use.", MIB),
    "utilization.gpu": ("station_gpu_utilization_ratio", "Share of the time in which a kernel ran.", 0.01),
    "power.draw": ("station_gpu_power_watts", "Power drawn.", 1),
    "enforced.power.limit": ("station_gpu_power_limit_watts", "Power limit in force.", 1),
    "temperature.gpu": ("station_gpu_temperature_celsius", "Temperature.", 1),
    "temperature.gpu.tlimit": ("station_gpu_thermal_margin_celsius", "Degrees left until it slows down.", 1),
    "clocks.sm": ("station_gpu_sm_clock_hertz", "Clock of the multiprocessors.", MHZ),
    "ecc.errors.uncorrected.volatile.total": ("station_gpu_ecc_uncorrected", "Uncorrected errors since the boot.", 1),
}
REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
ACTIVE = "clocks_event_reasons.active"
UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field')
TIMEOUT_S = 8

Sample = tuple[str, str, dict[str, str], float]


def ask_driver(program: str) -> list[dict[str, str]] | None:
    """Each GPU's fields as text; None where nvidia-smi fails. Fields that this driver doesn't know are left out."""
    names = ["uuid", "name", *FIELDS, ACTIVE]
    while len(names) > 2:
        argv = [program, f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
        try:
            answer = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if answer.returncode == 0:
            rows = (line.split(", ") for line in answer.stdout.strip().splitlines())
            return [dict(zip(names, (value.strip() for value in row), strict=False)) for row in rows]
        unknown = UNKNOWN_FIELD.search(answer.stdout + answer.stderr)
        if unknown is None or unknown[1] not in names:
            return None
        names.remove(unknown[1])
    return None


def gpu_samples() -> Iterator[Sample]:
    """Metrics of the GPUs; none without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return
    gpus = ask_driver(program)
    yield "station_gpu_query_ok", "Whether nvidia-smi answered.", {}, float(gpus is not None)
    for gpu in gpus or []:
        labels = {"uuid": gpu["uuid"], "name": gpu["name"]}
        for name, (metric, what, factor) in FIELDS.items():
            try:
                yield metric, what, labels, float(gpu[name]) * factor
            except (KeyError, ValueError):  # unknown to the driver, or [N/A]
                continue
        try:
            active = int(gpu[ACTIVE], 16)
        except (KeyError, ValueError):
            continue
        for bit, reason in REASONS.items():
            yield (
                "station_gpu_throttled",
                "Whether this reason slows it now.",
                {**labels, "reason": reason},
                float(bool(active & bit)),
            )


def disk_samples(cache: Path) -> Iterator[Sample]:
    """Size and free bytes of the file system under the cache; none while there is no cache."""
    try:
        disk = shutil.disk_usage(cache)
    except OSError:
        return
    yield "station_cache_size_bytes", "Size of the cache's file system.", {}, float(disk.total)
    yield "station_cache_free_bytes", "Bytes free there.", {}, float(disk.free)


def exposition(samples: list[Sample]) -> str:
    """Prometheus' text format; samples of one metric stand together."""
    lines = []
    for metric in dict.fromkeys(sample[0] for sample in samples):
        of_this = [sample for sample in samples if sample[0] == metric]
        lines += [f"# HELP {metric} {of_this[0][1]}", f"# TYPE {metric} gauge"]
        for _, _, labels, value in of_this:
            text = ",".join(f'{key}="{escaped(label)}"' for key, label in labels.items())
            lines.append(f"{metric}{{{text}}} {value!r}" if text else f"{metric} {value!r}")
    return "\n".join(lines) + "\n"


def escaped(label: str) -> str:
    """A label's value as the text format wants it."""
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def handler(cache: Path) -> type[http.server.BaseHTTPRequestHandler]:
    """The handler of one exporter."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/metrics"
            body = exposition([*gpu_samples(), *disk_samples(cache)]).encode() if found else b"see /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """A scrape every few seconds is no news."""

    return Answers


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--listen", default="127.0.0.1:9491", help="address:port")
    parser.add_argument("--cache", type=Path, required=True, help="the cache folder whose disk is watched")
    given = parser.parse_args()
    host, port = given.listen.rsplit(":", 1)
    http.server.ThreadingHTTPServer((host, int(port)), handler(given.cache)).serve_forever()


if __name__ == "__main__":
    main()
