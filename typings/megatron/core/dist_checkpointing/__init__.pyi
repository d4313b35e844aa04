from typing import Any

from megatron.core.dist_checkpointing.strategies.base import LoadCommonStrategy, LoadShardedStrategy

def load(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str,
    sharded_strategy: LoadShardedStrategy | None = None,
    common_strategy: LoadCommonStrategy | None = None,
) -> dict[str, Any]: ...
