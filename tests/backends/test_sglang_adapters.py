"""What an SGLang server is given of adapters that are published alone; without a server."""

# transformers and peft are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
import torch
from engine_cases import Case, make_case, weights_of
from peft import PeftModel
from test_adapter_publishing import ATTENTION, DENSE, adapted
from transformers import AutoModelForCausalLM

from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.engines.served.expectation import expect_model
from penstock.backends.engines.served.sglang.adapters import LoadedBase, launch_options, stage_adapter
from penstock.backends.learners.options import LoraOptions
from penstock.backends.learners.torch.adapter_publishing import AdapterPublisher
from penstock.backends.learners.torch.reference import BasePolicy
from penstock.backends.learners.worker_group.workers import SOLO
from penstock.backends.weights.disk import DiskExporter
from penstock.backends.weights.protocol import WeightFetchError

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.messages.weights import LowRank, WeightManifest


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case("qwen3_tied", tmp_path / "model")


def published(case: Case, folder: Path) -> WeightManifest:
    model = adapted(case.folder, rank=4, alpha=8)
    assert model.adapters is not None
    publisher = AdapterPublisher(SOLO, DiskExporter(folder, 1))
    manifest = publisher.publish(model, BasePolicy(model, model.adapters), version=3, publish=3, canary=None)
    assert manifest is not None
    return manifest


@torch.no_grad()
def test_a_staged_adapter_is_what_peft_reads_and_the_base_comes_where_it_lacks(case: Case, tmp_path: Path) -> None:
    manifest, loaded = published(case, tmp_path / "weights"), LoadedBase()
    expected = expect_model(case.folder)
    folder = tmp_path / "staged"
    staged = stage_adapter(manifest, model_folder=case.folder, folder=folder, expected=expected, loaded=loaded)
    assert sorted(path.name for path in folder.iterdir()) == ["v3.1.3", "v3.1.3-adapter"]
    assert staged.digest_now() == manifest.digest
    assert staged.tensors.keys() >= weights_of(case.model).keys() - {"lm_head.weight"}
    with quiet_transformers():
        plain = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32)
    peft_model = cast("Any", PeftModel.from_pretrained(plain, str(folder / "v3.1.3-adapter")))
    tokens = list(range(5, 25))
    found = peft_model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    model = adapted(case.folder, rank=4, alpha=8)
    torch.testing.assert_close(found, model.next_token_logits(tokens).log_softmax(-1), rtol=0, atol=1e-5)
    staged.close()
    assert not list(folder.iterdir())
    loaded.digest = manifest.base_digest
    again = stage_adapter(manifest, model_folder=case.folder, folder=folder, expected=expected, loaded=loaded)
    assert [path.name for path in folder.iterdir()] == ["v3.1.3-adapter"]
    assert not again.tensors
    again.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 5}, r"lora_A\.weight: expected shape \[5, 96\], found \[4, 96\]"),
        ({"model": "llama_untied"}, r"expected shape|has an adapter, and is no matrix"),
    ],
)
def test_adapters_of_another_model_are_not_staged(
    change: dict[str, Any], message: str, case: Case, tmp_path: Path
) -> None:
    manifest = published(case, tmp_path / "weights")
    low_rank = cast("LowRank", manifest.low_rank)
    other = make_case(change.get("model", "qwen3_tied"), tmp_path / "other").folder
    wrong = msgspec.structs.replace(
        manifest, low_rank=msgspec.structs.replace(low_rank, rank=change.get("rank", low_rank.rank))
    )
    with pytest.raises(WeightFetchError, match=message):
        stage_adapter(
            wrong, model_folder=other, folder=tmp_path / "staged", expected=expect_model(other), loaded=LoadedBase()
        )
    assert not (tmp_path / "staged").exists() or not list((tmp_path / "staged").iterdir())


def test_a_server_is_told_at_its_start_what_will_be_adapted(tmp_path: Path) -> None:
    lora = LoraOptions(rank=8, target_modules=("self_attn.v_proj", "q_proj"))
    assert launch_options(lora, (), is_cpu=False) == {
        "enable_lora": True,
        "max_lora_rank": 8,
        "lora_target_modules": ["v_proj", "q_proj"],
    }
    for name, modules in (("qwen3_tied", DENSE), ("qwen3_moe_shares", DENSE)):
        weights = weights_of(make_case(name, tmp_path / name).model)
        options = launch_options(LoraOptions(), weights, is_cpu=True)
        assert options["lora_target_modules"] == [*modules], name
        assert options["lora_backend"] == "torch_native"
    experts = {name: weight for name, weight in weights.items() if ".layers.1." in name}
    assert launch_options(LoraOptions(), experts, is_cpu=False)["lora_target_modules"] == [*ATTENTION]
