"""Whole runs of models that no forward pass of ours computes: the embedded engine draws by transformers' cache, and has
the log-probs that the learner computes, packed or padded."""

# transformers' factories have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from live_run import LiveRun
from short_runs import LINES_ALONE

from penstock.backends.checkpoint.make import make_model
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from pathlib import Path

models: Any = transformers
pytestmark = [pytest.mark.long_run, pytest.mark.timeout(300)]

SHORT = (
    *LINES_ALONE, "model.make=null", "learner.learning_rate=0.01", "engines.count=1", "run.num_steps=4",
    "learner.warm_start.num_steps=10",
)  # fmt: skip
FRESH = "train/fresh_logprob_abs_diff"
SIZES: dict[str, Any] = {
    "vocab_size": 79, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "gemma2": lambda: models.Gemma2Config(**SIZES, attn_logit_softcapping=5.0, sliding_window=16),
    "lfm2": lambda: models.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
}
SLOWER = "the embedded engine computes this model by transformers' own layers and cache, several times slower"
PADDED = "Lfm2ForCausalLM cannot be trained on packed tokens: the log-probs of a sequence change by"


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_learner_compute_the_same(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model("xs", folder, 0)  # whose tokenizer it has
    torch.manual_seed(3)
    with quiet_transformers():
        models.AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(folder)
    with LiveRun("sync.yaml", tmp_path, (f"model.path={folder}", *SHORT)) as run:
        summary = run.finish()
        steps = read_steps(run.folder)
        differences = [value for step in steps if (value := step.metrics.get(FRESH)) is not None]
        report = audit_ledger(run.folder / LEDGER_FILE)
    assert summary.version == 4
    assert len(differences) == 4
    assert max(differences) < 1e-5
    assert report.is_clean
    assert [text for text in summary.warnings if SLOWER in str(text)]
    assert bool([text for text in summary.warnings if PADDED in str(text)]) == (family == "lfm2")
