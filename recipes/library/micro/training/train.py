"""Room recipes: trains the micro NemotronH model (main model and MTP layer) on the streams, and writes its folder.

    python train.py --out model                          # one CUDA GPU; 7 minutes on an H200
    python train.py --out smoke --device cpu --steps 5   # smoke test

Three stages: main model and MTP layer together on streams of 1,024 characters, the same on streams of
2,048, then the MTP layer alone on the main model's own greedy text. All random choices are seeded; the
first two stages are bounded by time, so the number of steps depends on the machine.
"""

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path

import streams
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from batches import loader, stream_prompts
from checkpoint import load, save, write_json
from grade import evaluate
from nemotron import DRAFTS, Model, Shape, greedy
from torch import Tensor, nn

MTP_WEIGHTS = (0.3, 0.15, 0.15)  # of the MTP layer's steps 1, 2 and 3 beside the main loss
CHAIN_STARTS = 64  # positions per stream from which steps 2 and 3 are trained


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp_min(1)


def draft_losses(model: Model, tokens: Tensor, weights: Tensor, hidden: Tensor) -> list[Tensor]:
    """Cross-entropy of the three draft steps."""
    rows, length = tokens.shape
    starts = torch.randint(length - DRAFTS - 1, (rows, CHAIN_STARTS), device=tokens.device)
    first, *later = model.drafts(tokens, hidden, starts)
    losses = [cross_entropy(first[:, :-1], tokens[:, 2:], weights[:, 2:])]
    for ahead, logits in enumerate(later, 3):
        target, weight = (t.gather(1, starts + ahead) for t in (tokens, weights))
        losses.append(cross_entropy(logits, target, weight))
    return losses


@torch.no_grad()
def answer_loss(model: Model, tokens: Tensor, weights: Tensor, hidden: Tensor) -> float:
    """Cross-entropy of the answers' characters alone."""
    only = (weights[:, 1:] == 1).float()
    return round(cross_entropy(model.lm_head(hidden.float())[:, :-1], tokens[:, 1:], only).item(), 4)


def optimiser(parameters: list[nn.Parameter], args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=args.device == "cuda")


def update(optimizer: torch.optim.Optimizer, loss: Tensor, parameters: list[nn.Parameter], lr: float) -> None:
    """One optimiser step at this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def cosine(progress: float) -> float:
    """The share of the peak learning rate at this share of the run."""
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Clock:
    """How far a stage is, by steps if their number is given, by time if not; starts with step 2."""

    def __init__(self, minutes: float, steps: int | None) -> None:
        self.seconds, self.steps, self.step, self.began = 60 * minutes, steps, 0, time.monotonic()

    def tick(self) -> float:
        """Counts a step; returns the share of the stage that is over."""
        self.step += 1
        if self.step == 1:
            self.began = time.monotonic()
        return self.step / self.steps if self.steps else (time.monotonic() - self.began) / self.seconds


def train(model: Model, args: argparse.Namespace, log: dict) -> None:
    """Main model and MTP layer together, first on shorter, then on longer streams."""
    parameters = list(model.parameters())
    optimizer = optimiser(parameters, args)
    clock, began, length, saved = Clock(args.minutes, args.steps), time.monotonic(), args.lengths[0], 0
    batches = loader(args, length)
    progress = 0.0
    while progress < 1:
        if length != args.lengths[1] and progress > args.longer_from:
            length = args.lengths[1]
            batches = loader(args, length)
        tokens, weights = next(batches)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            hidden = model.hidden(tokens)
            main = cross_entropy(model.lm_head(hidden)[:, :-1], tokens[:, 1:], weights[:, 1:])
            drafts = draft_losses(model, tokens, weights, hidden)
        loss = main + sum(w * d for w, d in zip(MTP_WEIGHTS, drafts, strict=True))
        update(optimizer, loss, parameters, args.lr * cosine(progress) * min(1, (clock.step + 1) / 300))
        progress = clock.tick()
        if clock.step % args.log_every == 0 or progress >= 1:
            record = {
                "seconds": round(time.monotonic() - began, 1),
                "step": clock.step,
                "length": length,
                "main": round(main.item(), 4),
                "drafts": [round(d.item(), 4) for d in drafts],
                "answers": answer_loss(model, tokens, weights, hidden),
            }
            log["losses"].append(record)
            report(record)
            if time.monotonic() - saved > 90:
                save(model, args.out)
                saved = time.monotonic()
    log |= {"steps": clock.step, "tokens": clock.step * args.tokens_per_step}


def distil(model: Model, args: argparse.Namespace, log: dict) -> None:
    """The MTP layer alone, on greedy text of the main model, which stays as it is."""
    parameters = list(model.drafter.parameters())
    optimizer = optimiser(parameters, args)
    new, rows = args.distil_new, args.tokens_per_step // (256 + args.distil_new)
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda")
    with autocast:
        prompts = stream_prompts(range(args.distil_streams), 256, streams.TRAIN, args.device)
        texts = torch.cat([greedy(model, part, new) for part in prompts.split(1024)])
    weights = torch.zeros(rows, texts.shape[1], device=args.device)
    weights[:, 256:] = 1
    clock, progress = Clock(args.distil_minutes, args.steps), 0.0
    while progress < 1:
        tokens = texts[torch.randint(len(texts), (rows,), device=args.device)]
        with autocast:
            with torch.no_grad():
                hidden = model.hidden(tokens)
            losses = draft_losses(model, tokens, weights, hidden)
        update(optimizer, sum(losses), parameters, 0.5 * args.lr * cosine(progress))
        progress = clock.tick()
        if clock.step % args.log_every == 0 or progress >= 1:
            report({"distil step": clock.step, "drafts": [round(x.item(), 4) for x in losses]})
    log["distillation"] = {
        "steps": clock.step,
        "streams": len(texts),
        "new tokens each": new,
        "draft losses": [round(x.item(), 4) for x in losses],
    }


def report(record: dict) -> None:
    """One line of JSON on standard output."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and train-log.json")
    parser.add_argument("--init", type=Path, help="model folder to start from")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--minutes", type=float, default=4.8, help="for stages 1 and 2; 0 leaves them out")
    parser.add_argument("--distil-minutes", type=float, default=0.7, help="for stage 3, its text aside")
    parser.add_argument("--steps", type=int, help="bound each stage by steps instead")
    parser.add_argument("--tokens-per-step", type=int, default=65536)
    parser.add_argument("--lengths", type=int, nargs=2, default=(1024, 2048))
    parser.add_argument("--longer-from", type=float, default=0.7, help="when the longer streams start")
    parser.add_argument("--distil-streams", type=int, default=4096)
    parser.add_argument("--distil-new", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.device == "cpu":
        args.workers, args.log_every, args.tokens_per_step = 0, 1, 4096
        args.distil_streams, args.distil_new = 4, 64
    return args


def main() -> None:
    args, began = arguments(), time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = load(args.init, args.device) if args.init else Model(Shape()).to(args.device)
    if args.device == "cuda":
        torch._dynamo.config.recompile_limit = 64
        for layer in model.backbone["layers"]:
            layer.compile(dynamic=False)
    log = {
        "machine": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": args.seed,
        "arguments": {k: str(v) for k, v in vars(args).items()},
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": [],
    }
    if args.minutes:
        train(model, args, log)
        save(model, args.out)
    model = load(args.out if args.minutes else args.init, args.device)
    log["before distillation"] = evaluate(model, args)
    report(log["before distillation"])
    if args.distil_minutes:
        distil(model, args, log)
    save(model, args.out)
    log["result"] = evaluate(load(args.out, args.device), args)
    log["seconds in all"] = round(time.monotonic() - began)
    report(log["result"])
    write_json(args.out / "train-log.json", log)


if __name__ == "__main__":
    main()
