"""Models as Kimi's are published: a name of their own, code beside them, and pieces of tokens in tiktoken's format."""

# transformers and safetensors are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import base64
import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import open_learner
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from penstock.backends.checkpoint.checkpoint_names import CheckpointNames
from penstock.backends.checkpoint.make import make_model
from penstock.backends.checkpoint.open_config import open_config
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.learners.megatron.bridge.architecture import read_architecture
from penstock.backends.learners.megatron.bridge.weight_map import parameters_of
from penstock.messages.commands import OpenLearner, SaveCheckpoint
from penstock.messages.errors import UserFault
from penstock.messages.local import CheckpointWritten, LearnerOpened
from penstock.runtime.cli.convert import convert
from penstock.runtime.preflight.checkpoints import check_checkpoint

MODELS = sorted((Path(__file__).parents[2] / "scenarios" / "models").glob("*.json"))
"""The copies of ``config.json`` that ship."""
SIZES: dict[str, Any] = {
    "vocab_size": 290, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "eos_token_id": 277,
}  # fmt: skip
PIECES = [b"th", b"he", b" t", b"the", b" the", b"in", b"er", b"\xe4\xbd", b"\xe4\xbd\xa0", b"12", b"123", b"\n\n"]
"""What tokens there are besides the single bytes; in the order of their numbers, from 256 on."""
SPECIAL = {276: "[BOS]", 277: "[EOS]", 280: "<|im_end|>"}
CODE = '''
raise SystemExit("this code is never run")
class OwnTokenizer:
    pat_str = "|".join([r"""\\p{Han}+""", r"""[^\\r\\n\\p{L}\\p{N}]?[\\p{L}&&[^\\p{Han}]]+""", r"""\\p{N}{1,3}""",
                        r""" ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*""", r"""\\s+"""])
'''
PATTERN = r"\p{Han}+|[^\r\n\p{L}\p{N}]?[\p{L}&&[^\p{Han}]]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
TEXTS = [
    "the other thing there",
    "你好 the 1234567!\n\n",
    "[EOS]in<|im_end|> er",
    " \t\u00e9 日本 x&&[y]",
    "<|reserved_token_289|>",
]


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    folder = tmp_path / "kimi"
    torch.manual_seed(5)
    with quiet_transformers():
        DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_bytes())
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    pieces = [bytes([byte]) for byte in range(256)] + PIECES + [bytes([65, byte]) for byte in range(97, 105)]
    rows = (base64.b64encode(piece) + b" " + str(rank).encode() for rank, piece in enumerate(pieces))
    (folder / "tiktoken.model").write_bytes(b"\n".join(rows) + b"\n")
    (folder / "tokenization_own.py").write_text(CODE)
    added = {str(number): {"content": text, "special": True} for number, text in SPECIAL.items()}
    of_tokenizer = {
        "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer",
        "added_tokens_decoder": added, "eos_token": "[EOS]",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    return folder


def converted(source: Path, target: Path, dtype: str | None = None) -> None:
    arguments: dict[str, Any] = {"version": None, "max_shard_size": "1GB", "target_format": "huggingface"}
    assert convert(source, target, Console(file=StringIO()), dtype=dtype, **arguments) == 0


def test_the_copy_of_a_kimi_needs_no_code_and_has_the_tokens_of_tiktoken(kimi: Path, tmp_path: Path) -> None:
    converted(kimi, tmp_path / "copy")
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in (
        line.split() for line in (kimi / "tiktoken.model").read_bytes().splitlines()
    )}  # fmt: skip
    reserved = {number: f"<|reserved_token_{number}|>" for number in range(276, 290)} | SPECIAL
    special = {text: number for number, text in reserved.items()}
    wanted = pytest.importorskip("tiktoken").Encoding(
        "made", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    ours = TextTokenizer(tmp_path / "copy")
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path / "copy")
    for text in TEXTS:
        ids = wanted.encode(text, allowed_special="all")
        assert theirs.encode(text, add_special_tokens=False) == ids
        assert ours.encode([text], special=True) == [ids]
        assert theirs.decode(ids) == text
    config = json.loads((tmp_path / "copy" / "config.json").read_bytes())
    assert config["model_type"] == "deepseek_v3"
    assert "auto_map" not in config
    check_checkpoint(tmp_path / "copy")


def test_tiktoken_files_are_refused_with_what_to_do(kimi: Path, tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=r"model\.path: .*tiktoken\.model .*penstock convert MODEL COPY"):
        check_checkpoint(kimi)
    with pytest.raises(UserFault, match=r"tiktoken\.model .*penstock convert MODEL COPY"):
        TextTokenizer(kimi)
    for code in ("pat_str = '|'.join(made())", "-" * 100_000 + "1", "x" + ".a" * 50_000):
        (kimi / "tokenization_own.py").write_text(code)
        with pytest.raises(UserFault, match=r"no tokenization\*\.py with a plain pat_str"):
            converted(kimi, tmp_path / "copy")
    (kimi / "tokenization_own.py").write_text(CODE)
    twice = {"added_tokens_decoder": {"276": {"content": "A"}}}  # a byte, which has a number already
    (kimi / "tokenizer_config.json").write_text(json.dumps(twice))
    with pytest.raises(UserFault, match=r"token 'A' .* has number 276, and 65 as well"):
        converted(kimi, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_the_tables_name_the_weights_that_transformers_names(file: Path, tmp_path: Path) -> None:
    config = json.loads(file.read_bytes()) | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: Any = opened.from_config(open_config(tmp_path))
    state = model.state_dict()
    theirs = {name: tuple(tensor.shape) for name, tensor in CheckpointNames(model).rename(state).items()}
    if config["tie_word_embeddings"]:
        del theirs["lm_head.weight"]
    tensors = (tensor for parameter in parameters_of(read_architecture(tmp_path)) for tensor in parameter.tensors)
    assert {tensor.name: tensor.shape for tensor in tensors} == theirs


def test_a_run_keeps_the_layers_that_it_does_not_train(tmp_path: Path) -> None:
    make_model("xs", tmp_path / "model", seed=0)
    own = load_file(tmp_path / "model" / "model.safetensors")
    more = {"model.layers.2.eh_proj.weight": torch.randn(64, 128), "model.layers.2.enorm.weight": torch.randn(64)}
    save_file(own | more, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    learner = open_learner(tmp_path / "model", tmp_path / "run" / "checkpoints")
    learner.ask(OpenLearner(), LearnerOpened)
    saved = learner.ask(SaveCheckpoint(version=0), CheckpointWritten)
    learner.close()
    assert not set(more) & set(load_file(f"{saved.path}/model.safetensors"))
    converted(tmp_path / "run", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == (own | more).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in more.items())
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "layers_beyond")
    converted(tmp_path / "run", tmp_path / "without")
    assert load_file(tmp_path / "without" / "model.safetensors").keys() == own.keys()
