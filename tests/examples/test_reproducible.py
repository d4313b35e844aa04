"""The same seed gives the same samples and the same weights in ``sync``, bit for bit on one machine; also when an
engine is killed in one of the two runs."""

# pyarrow and safetensors are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from live_run import LiveRun
from safetensors.torch import load_file

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE

if TYPE_CHECKING:
    from pathlib import Path

    import torch

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(540)]

SCENARIO = "examples/reproducible.yaml"
NUM_STEPS = 4
CONTENTS = (
    "row", "epoch", "prompt_tokens", "response_tokens", "logprobs", "loss_mask", "spans", "part_lengths", "outcome",
    "reward", "reward_components", "version", "staleness",
)  # fmt: skip
"""Of a sample; what is not among them is who made it, and how often it was issued."""
REWARD = """
def reward(response: str) -> float:
    return sum(letter.isupper() for letter in response) / (len(response) + 1)
"""


class Left(NamedTuple):
    """What a run left."""

    samples: dict[tuple[int, int], dict[str, Any]]
    weights: dict[str, torch.Tensor]
    attempts: set[int]


def run(folder: Path, *, kills: bool) -> Left:
    import pyarrow.parquet as parquet

    folder.mkdir()
    (folder / "capitals.py").write_text(REWARD)
    overrides = (
        f"run.num_steps={NUM_STEPS}",
        "learner.groups_per_batch=8",
        "learner.warm_start=null",
        f"reward.function={folder / 'capitals.py'}:reward",
        "sampling.max_response_tokens=96",
        "engines.slots=8",
        "engines.progress_tokens=8",  # so that a killed engine leaves beginnings that another one goes on with
        "runtime.heartbeat_timeout_s=60",  # a test machine may be busy with other things
    )
    with LiveRun(SCENARIO, folder, overrides) as live:
        if kills:
            live.await_steps(1)
            os.kill(live.pid_of("engine/0"), signal.SIGKILL)
        summary = live.finish()
        root = live.folder
    assert summary.completed
    assert ("engine/0" in [restart.name for restart in summary.restarts]) == kills
    assert audit_ledger(root / LEDGER_FILE).findings == ()
    rows = [row for file in sorted(root.glob("samples/*.parquet")) for row in parquet.read_table(file).to_pylist()]
    samples = {(row["group_id"], row["sample_index"]): {name: row[name] for name in CONTENTS} for row in rows}
    (last,) = root.glob(f"checkpoints/version-{NUM_STEPS:07d}*/model.safetensors")
    return Left(samples, load_file(last), {row["attempt"] for row in rows})


def assert_same(one: Left, other: Left) -> None:
    assert one.samples.keys() == other.samples.keys()
    different = {
        key: [name for name in CONTENTS if one.samples[key][name] != other.samples[key][name]] for key in one.samples
    }
    assert not {key: names for key, names in different.items() if names}
    assert one.weights.keys() == other.weights.keys()
    assert all((tensor == other.weights[name]).all() for name, tensor in one.weights.items())


def test_the_same_seed_gives_the_same_samples_and_weights_also_when_an_engine_is_killed(tmp_path: Path) -> None:
    first = run(tmp_path / "first", kills=False)
    killed = run(tmp_path / "killed", kills=True)
    assert len(first.samples) == NUM_STEPS * 8 * 8
    assert len({sample["reward"] for sample in first.samples.values()}) > 8  # something was learnt from
    assert_same(first, killed)
