"""What a model folder's ``config.json`` is read as, wherever its keys stand and whatever they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock.backends.checkpoint.hf_config import DecoderConfig, HfConfig, decode_config, need, read_config
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path


def read(**document: object) -> DecoderConfig:
    return decode_config(msgspec.json.encode(document), "config.json", DecoderConfig)


def test_keys_of_the_language_model_come_before_those_of_the_whole() -> None:
    inner = {"model_type": "x_text", "vocab_size": 7, "hidden_size": 8, "num_hidden_layers": None, "eos_token_id": [3]}
    config = read(model_type="x", architectures=["X"], vocab_size=5, num_hidden_layers=2, eos_token_id=1,
                  tie_word_embeddings=True, text_config=inner)  # fmt: skip
    assert (config.model_type, config.architectures) == ("x", ("X",))
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (7, 8, 2)
    assert config.tie_word_embeddings
    assert config.eos_token_id == (1, 3)


def test_null_is_not_there() -> None:
    assert read(mlp_only_layers=None, use_sliding_window=None, num_key_value_heads=None, text_config=None) == read()


@pytest.mark.parametrize(
    ("document", "count"),
    [({}, None), ({"num_experts": 4}, 4), ({"num_local_experts": 8}, 8), ({"n_routed_experts": 16}, 16)],
)
def test_experts_are_counted_under_each_of_their_names(document: dict[str, Any], count: int | None) -> None:
    assert read(**document).expert_count == count


def test_the_rotary_base_is_found_where_old_and_new_checkpoints_have_it() -> None:
    assert read(rope_theta=5.0).rope_base == read(rope_parameters={"rope_theta": 5.0}).rope_base == 5.0
    assert read().rope_base == 10_000.0


def test_what_lacks_or_is_wrong_is_named_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=r"config\.json: lacks vocab_size; expected the config of a causal"):
        need(read(num_attention_heads=2), "config.json", "vocab_size", "num_attention_heads")
    with pytest.raises(UserFault, match=r"config\.json: .*vocab_size"):
        read(vocab_size=-1)
    file = tmp_path / "config.json"
    with pytest.raises(UserFault, match=r"has no config\.json"):
        read_config(tmp_path, HfConfig)
    file.write_text("[]")
    with pytest.raises(UserFault, match=f"{file}: not the JSON that belongs there"):
        read_config(tmp_path, HfConfig)


def test_keys_that_only_some_readers_need_do_not_refuse_a_model_for_the_others() -> None:
    odd = msgspec.json.encode({"vocab_size": 5, "intermediate_size": [8, 16], "num_experts": [1, 2]})
    assert decode_config(odd, "config.json", HfConfig).vocab_size == 5
