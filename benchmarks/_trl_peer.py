"""TRL's ``GRPOTrainer`` on the rows, rewards and learning rates of a Penstock run; run by the peers' own Python.

Only the pure modules of Penstock are imported, so that environment needs none of its packages. One argument: a JSON
file with the fields of :class:`Job`. On stdout come JSON lines with ``at_s``, seconds since the epoch: one when
training begins, and one when a step is over, with its mean reward and the mean length of its responses in tokens.
"""

# The peers' packages are in an environment of their own:
# mypy: ignore-errors
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from penstock.backends.data.lines import lines_reward
from penstock.backends.learners.learning_rate import learning_rate


class Job(NamedTuple):
    """What is to be trained."""

    model: str
    rows: list[dict[str, str]]
    """With ``prompt`` and ``answer``, those of a step after those of the step before."""
    num_steps: int
    groups_per_batch: int
    samples_per_group: int
    max_response_tokens: int
    learning_rate: float
    warmup_steps: int
    schedule: str
    betas: tuple[float, float]
    max_grad_norm: float
    clip_low: float
    clip_high: float
    micro_batch: int
    """Samples of one forward and backward pass."""
    num_threads: int
    seed: int
    folder: str


class _Steps(TrainerCallback):
    """Tells when training begins, and of each step what the trainer logs of it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:  # noqa: ANN401
        print(json.dumps({"at_s": time.time()}), flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **rest: Any) -> None:  # noqa: ANN401
        if "reward" in logs:
            row = {"at_s": time.time(), "reward": logs["reward"], "mean_tokens": logs["completions/mean_length"]}
            print(json.dumps(row), flush=True)


def main(file: str) -> None:
    """Train."""
    job = Job(**json.loads(Path(file).read_text()))
    torch.set_num_threads(job.num_threads)
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=job.betas, weight_decay=0.0, fused=True)

    def rate(step: int) -> float:
        return learning_rate(
            min(step, job.num_steps - 1),
            peak=job.learning_rate,
            warmup_steps=job.warmup_steps,
            num_steps=job.num_steps,
            schedule=job.schedule,  # type: ignore[arg-type]
        )

    def reward(completion_ids: list[list[int]], completions: list[str], answer: list[str], **rest: Any) -> list[float]:  # noqa: ANN401
        given = zip(completions, answer, completion_ids, strict=True)
        return [lines_reward(text, right, truncated=ids[-1] != tokenizer.eos_token_id) for text, right, ids in given]

    samples = job.groups_per_batch * job.samples_per_group
    config = GRPOConfig(
        output_dir=job.folder,
        use_cpu=True,
        seed=job.seed,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        max_steps=job.num_steps,
        shuffle_dataset=False,
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=samples // job.micro_batch,
        num_generations=job.samples_per_group,
        max_completion_length=job.max_response_tokens,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        epsilon=job.clip_low,
        epsilon_high=job.clip_high,
        scale_rewards="group",
        max_grad_norm=job.max_grad_norm,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(job.rows),
        processing_class=tokenizer,
        callbacks=[_Steps()],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)),
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
