"""What a scenario can ask for beside the usual, on the device: short whole runs, each of which ends, loses nothing and
draws by the log-probs that the learner computes.

Embedded engines: float16, rollout in FP8, adapters alone, cut-offs that are replayed, profiles with snapshots of
memory, a model that sees. Stock SGLang servers, in turns with the learner on the one device: by each way that weights
can go there, a model that sees, and with ``learner.true_on_policy``, whose difference has to be exactly 0. Each arm is
a run of its own; one that fails is a claim that is missed, with what it said.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.checkpoint.make import write_seeing_model
from penstock.backends.checkpoint.make_vision import PUBLISHED_PATCH_SIZE
from penstock.backends.engines.served.sglang.environment import find_environment
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.backends.profiling import SNAPSHOT_SUFFIX, TRACE_SUFFIX, profile_files
from penstock.benchmarks._harness import Measured, fact, plain_figure
from penstock.benchmarks._progress import in_turn
from penstock.benchmarks._runs import FinishedRun, run
from penstock.benchmarks.gpu._stage import made_model_of_letters, stage, stand_of
from penstock.benchmarks.gpu.runs import SCENARIO
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    import argparse

    from penstock.benchmarks.gpu._stage import Stand

SHORT: Final = (
    "staleness.policy=sync",
    "learner.groups_per_batch=8",
    "engines.slots=64",
    "runtime.heartbeat_timeout_s=60",
)
SERVED: Final = (
    "engines.backend=sglang",
    "engines.placement=colocate",
    "engines.start_timeout_s=600",
    "engines.sglang.mem_fraction_static=0.5",
)
SEEING: Final = """\
run: {{name: gpu, num_steps: {num_steps}}}
runtime: {{host: local}}
model: {{path: {model}, dtype: {dtype}}}
data: {{path: "shapes:400", chat_template: true, multimodal_keys: {{image: images}}}}
sampling: {{samples_per_group: 8, max_response_tokens: 1}}
reward: {{function: f1}}
filter: {{drop_zero_spread: false}}
engines: {{device: {device}}}
learner: {{device: {device}, learning_rate: 1.0e-3}}
"""


class Arm(NamedTuple):
    """A run, and how near engine and learner have to be in it, in nats a token."""

    overrides: tuple[str, ...] = ()
    is_served: bool = False
    max_mismatch: float = 0.05
    sees: bool = False


ARMS: Final[dict[str, Arm]] = {
    "float16": Arm(("model.dtype=float16",), max_mismatch=0.01),
    "FP8": Arm(("engines.quantization=fp8",), max_mismatch=0.3),
    "adapters alone": Arm(("learner.lora.publish=adapter",)),
    "cut-offs replayed": Arm(("sampling.top_p=0.9", "sampling.replay_kept=64")),
    "profiles": Arm(
        tuple(f"{side}.profile.{key}" for side in ("learner", "engines") for key in ("last_step=2", "memory=true"))
    ),
    "images": Arm(sees=True),
    "SGLang": Arm(SERVED, is_served=True),
    "SGLang, by handles": Arm((*SERVED, "weights.transport=tensor"), is_served=True),
    "SGLang, by disk": Arm((*SERVED, "weights.transport=disk"), is_served=True),
    "SGLang, images": Arm(SERVED, is_served=True, sees=True),
    "SGLang, true on-policy": Arm(
        (
            *SERVED,
            "learner.true_on_policy=true",
            "engines.sglang.enable_deterministic_inference=true",
            "engines.sglang.rl_on_policy_target=fsdp",
            "engines.sglang.attention_backend=fa3",
        ),
        is_served=True,
        max_mismatch=0.0,
    ),
}


def measure(given: argparse.Namespace) -> Measured:
    stand = stand_of(given)
    why_not = _why_no_servers(stand)
    chosen = [name for name, arm in ARMS.items() if not (arm.is_served and why_not)]
    measured = Measured([], [], (f"SGLang's servers: {why_not}",) if why_not else ())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        letters = made_model_of_letters(stand, folder / "model")
        write_seeing_model(folder / "seeing", 0, patch_size=PUBLISHED_PATCH_SIZE)
        for name in in_turn(chosen):
            model = folder / "seeing" if ARMS[name].sees else letters
            scenario = scenario_of(ARMS[name], stand, model, given.steps)
            _arm(name, scenario, folder / name.replace(" ", "_"), stand, measured)
    return measured


def scenario_of(arm: Arm, stand: Stand, model: Path, num_steps: int) -> str:
    """Its text, without the overrides."""
    return (SEEING if arm.sees else SCENARIO).format(
        num_steps=num_steps, model=model, dtype=stand.dtype_name, device=stand.device.type,
        warm_steps=100 if stand.is_real else 10,
    )  # fmt: skip


def _why_no_servers(stand: Stand) -> str:
    if not stand.is_real:
        return "they are not pretended"
    try:
        find_environment(is_cpu=False)
    except UserFault as error:
        return str(error)
    return ""


def _arm(name: str, scenario: str, folder: Path, stand: Stand, into: Measured) -> None:
    arm = ARMS[name]
    try:
        done = run(scenario, (*SHORT, *arm.overrides), folder)
    except RuntimeError as error:
        into.claims.append(fact(f"{name}: the run ends well; it said: {str(error)[-300:]}", holds=False))
        return
    into.claims.append(fact(f"{name}: the ledger balances", holds=audit_ledger(done.folder / LEDGER_FILE).is_clean))
    mismatch = done.summary.mean_logprob_abs_diff
    text = f"{name}: engine and learner agree on log-probs, to {arm.max_mismatch:g} nats"
    into.claims.append(fact(text, holds=mismatch is not None and mismatch <= arm.max_mismatch))
    first, last = done.steps[0], done.steps[-1]
    if mismatch is not None:
        into.figures.append(plain_figure(f"{name}: between engine and learner", "nats", [mismatch]))
    if last.version > first.version:
        into.figures.append(
            plain_figure(f"{name}: a step", "s", [(last.at_s - first.at_s) / (last.version - first.version)])
        )
    if name == "profiles":
        _profiles(done, stand, into)


def _profiles(done: FinishedRun, stand: Stand, into: Measured) -> None:
    names = [path.name for path in profile_files(done.folder)]
    for who in ("learner", "engine"):
        own = [name for name in names if name.startswith(who)]
        has_trace = any(name.endswith(TRACE_SUFFIX) for name in own)
        into.claims.append(fact(f"profiles: a trace of the {who}", holds=has_trace))
        if stand.is_real:
            has_snapshot = any(name.endswith(SNAPSHOT_SUFFIX) for name in own)
            into.claims.append(fact(f"profiles: a snapshot of the {who}'s memory", holds=has_snapshot))


def main(argv: list[str] | None = None) -> int:
    benchmark = stage(__file__, __doc__, repetitions=1)
    benchmark.option("--steps", type=int, default=5, help="of each run (default: 5)")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
