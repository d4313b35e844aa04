"""Whether the models that a scenario names can be read: config, tokenizer, weights (by their headers)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.backends.checkpoint.hf_config import CONFIG_FILE, HfConfig, find_config, find_weight_map, read_config
from penstock.backends.checkpoint.tokenizer_files import CONVERT, has_tiktoken_only
from penstock.backends.data.folder_template import FolderTemplate
from penstock.backends.data.special_tokens import read_special_tokens
from penstock.backends.data.tokenizer import FILE_NAME, TextTokenizer
from penstock.backends.engines.options import kinds
from penstock.backends.engines.spec import ENGINES
from penstock.backends.engines.transport_preflight import check_transport, model_size_bytes, sites_of
from penstock.backends.learners.spec import is_modelled
from penstock.messages.errors import UserFault
from penstock.messages.texts import unexpanded

if TYPE_CHECKING:
    from penstock.runtime.scenario.structure import Scenario

MADE_MODEL_BYTES: Final = {"xs": 415_232, "s": 1_213_440, "m": 3_191_808, "moe_xs": 765_184, "vlm_xs": 612_992}
"""Weights of the models of ``model.make`` in float32."""
FLOAT32_BYTES: Final = 4
BFLOAT16_BYTES: Final = 2

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")


def check_checkpoint(folder: Path, key: str = "model.path", *, needs_weights: bool = True) -> None:
    """The folder has a config, a tokenizer and every file of its weights."""
    if not folder.is_dir():
        what = "a file, not a folder" if folder.exists() else "no such folder"
        raise UserFault(
            f"{key}: {folder}: {what}; expected what transformers' save_pretrained writes, a name on the hub "
            f"(ORG/NAME), or set {key.removesuffix('path')}make{unexpanded(str(folder))}"
        )
    if has_tiktoken_only(folder):
        raise UserFault(f"{key}: {folder}: {CONVERT}")
    missing = [] if (folder / CONFIG_FILE).is_file() else [CONFIG_FILE]
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append("tokenizer.json")
    missing += _missing_weights(folder, key) if needs_weights else []
    if missing:
        raise UserFault(
            f"{key}: {folder}: missing {', '.join(missing)}; expected what save_pretrained of a transformers "
            "model and of its tokenizer write"
        )


def check_tokenizer(folder: Path, key: str = "model.path") -> None:
    """The tokenizer can be read, and it and the model know the same tokens."""
    if not (folder / FILE_NAME).is_file():
        return  # of another format, which engines of their own may read
    try:
        tokenizer, special = TextTokenizer(folder), read_special_tokens(folder)
        config = find_config(folder / CONFIG_FILE, HfConfig)
    except UserFault as error:
        raise UserFault(f"{key}: {error}") from None
    size = 0 if config is None else config.vocab_size
    if not size:
        return
    if tokenizer.num_own_tokens > size:
        raise UserFault(
            f"{key}: {folder}: tokenizer.json has {tokenizer.num_own_tokens} tokens, and the vocab_size of config.json "
            f"is {size}: the tokenizer is that of another model; copy the one that belongs to these weights"
        )
    for what, token in (("end-of-sequence", special.eos_id), ("padding", special.pad_id)):
        if not 0 <= token < size:
            raise UserFault(
                f"{key}: {folder}: the {what} token is number {token}, and the vocab_size of config.json is {size}; "
                "name one that the model has, in tokenizer_config.json or generation_config.json"
            )


def check_weight_files(folder: Path, key: str = "model.path") -> None:
    """The files of its weights are whole."""
    try:
        model_size_bytes(folder, "float32")
    except (UserFault, OSError) as error:
        raise UserFault(f"{key}: {error}") from None


def check_architecture(scenario: Scenario, folder: Path) -> None:
    """Every kind of engine can serve this model, and it was made for contexts this long."""
    for backend in sorted(kinds(scenario.engines)):
        try:
            limit = ENGINES.spec(backend).longest_context(folder)
        except ValueError as error:
            raise UserFault(f"model.path: {error}") from None
        if limit is not None and scenario.model.max_context > limit:
            raise UserFault(
                f"model.max_context: {scenario.model.max_context} tokens are more than {folder} was made for: "
                f"max_position_embeddings is {limit}; lower it to that"
            )


def check_teacher(scenario: Scenario) -> None:
    """The teacher's model can be asked about samples as long as these, and calls tokens as the student does."""
    teacher = scenario.teacher
    if teacher is None or teacher.model.path is None:
        return
    folder, max_context = Path(teacher.model.path), scenario.model.max_context
    check_checkpoint(folder, "teacher.model.path", needs_weights=not teacher.addresses)
    if not teacher.addresses:
        check_weight_files(folder, "teacher.model.path")
    limit = max_context
    try:
        if not teacher.addresses:  # such a server is asked when it is there
            spec = ENGINES.spec(teacher.backend).teacher
            assert spec is not None, "a scenario's rules ask for one that teaches"
            limit = spec.longest_sample(folder) or max_context
        if scenario.model.path is not None:
            from penstock.backends.data.same_tokens import check_same_tokens

            check_same_tokens(Path(scenario.model.path), folder)
    except UserFault as error:
        raise UserFault(f"teacher.model.path: {error}") from None
    if max_context > limit:
        raise UserFault(
            f"teacher.model.path: samples of {limit} tokens are the longest that {folder} can be asked about, and "
            f"model.max_context is {max_context}; lower that, or take another teacher"
        )


def check_reward_model(scenario: Scenario) -> None:
    """The reward model's folder holds one, with its head and, where that is wanted, a chat template."""
    model, key = scenario.reward_model, "reward_model.path"
    assert model is not None, "asked for a scenario with one"
    folder = Path(model.path)
    check_checkpoint(folder, key)
    check_weight_files(folder, key)
    check_tokenizer(folder, key)
    names = read_config(folder, HfConfig).architectures
    if not any(name.endswith("ForSequenceClassification") for name in names):
        raise UserFault(
            f"{key}: {folder} is {', '.join(names) or 'of no architecture'}; a reward model is one …"
            "ForSequenceClassification, with num_labels=1 (another kind can be a server of yours, for remote)"
        )
    if model.chat_template and FolderTemplate(folder).chat_template is None:
        raise UserFault(
            f"reward_model.chat_template: {folder} has no chat template; set it to false, or add that of its authors"
        )


def check_weights(scenario: Scenario, run_parent: Path) -> None:
    """There is room for the weights that are on their way from learner to engines."""
    model = scenario.model
    if is_modelled(scenario.learner):
        return
    there = next(folder for folder in (run_parent, *run_parent.parents) if folder.is_dir())
    if model.path is not None:
        size_bytes = model_size_bytes(Path(model.path), model.dtype)
    else:
        assert model.make is not None, "a scenario's rules ask for one of them"
        width = FLOAT32_BYTES if model.dtype == "float32" else BFLOAT16_BYTES
        size_bytes = MADE_MODEL_BYTES[model.make] * width // FLOAT32_BYTES
    sites = sites_of(scenario.engines, scenario.runtime.ray_address)
    check_transport(scenario.weights.transport, size_bytes=size_bytes, folder=there, engines=sites)


def _missing_weights(folder: Path, key: str) -> list[str]:
    try:
        weight_map = find_weight_map(folder)
    except UserFault as error:
        raise UserFault(f"{key}: {error}") from None
    if weight_map is None:
        if any(folder.glob("*.safetensors")):
            return []
        if any(folder.glob("pytorch_model*.bin")):
            raise UserFault(
                f"{key}: {folder}: its weights are pickles (pytorch_model.bin), which can run code when they are read; "
                "load it with transformers and call save_pretrained to write safetensors"
            )
        return ["model.safetensors"]
    return sorted(name for name in set(weight_map.values()) if not (folder / name).is_file())
