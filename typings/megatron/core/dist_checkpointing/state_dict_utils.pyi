from typing import Any

def save_preprocess(
    sharded_state_dict: dict[str, Any], validate_access_integrity: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]: ...
