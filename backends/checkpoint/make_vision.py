"""A small Qwen2.5-VL made on the spot, with random weights and an image processor: for tests and trials on a CPU."""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.backends.checkpoint.characters import CONTEXT_TOKENS, END_ID, IMAGE_SYMBOLS, PAD_ID, SYMBOLS

if TYPE_CHECKING:
    from pathlib import Path

PATCH_SIZE: Final = 4
PUBLISHED_PATCH_SIZE: Final = 14
"""Of every Qwen2.5-VL that is published. SGLang takes patches of another size for features."""
MERGE_SIZE: Final = 2
MAX_IMAGE_TOKENS: Final = 64


def random_vision_model(patch_size: int) -> Qwen2_5_VLForConditionalGeneration:
    """The model ``vlm_xs``, from torch's random numbers; ``patch_size``: in pixels."""
    start, end, image, video = range(len(SYMBOLS), len(SYMBOLS) + len(IMAGE_SYMBOLS))
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(SYMBOLS) + len(IMAGE_SYMBOLS), "hidden_size": 64, "intermediate_size": 192,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "max_position_embeddings": CONTEXT_TOKENS, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 4, 4]},
            "bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID,
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": patch_size, "temporal_patch_size": 2, "spatial_merge_size": MERGE_SIZE,
            "window_size": 2 * MERGE_SIZE * patch_size, "fullatt_block_indexes": [1],
        },
        image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end,
        tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)


def write_image_processor(folder: Path, patch_size: int) -> None:
    """Of the model ``vlm_xs``: an image has at most :data:`MAX_IMAGE_TOKENS` tokens."""
    square = (patch_size * MERGE_SIZE) ** 2
    Qwen2VLImageProcessorPil(
        patch_size=patch_size,
        temporal_patch_size=2,
        merge_size=MERGE_SIZE,
        size={"shortest_edge": square, "longest_edge": MAX_IMAGE_TOKENS * square},
    ).save_pretrained(folder)
