"""The reward of vlm.yaml."""


def right_colour(response: str, label: str) -> float:
    """1 if the answer begins with the letter of the colour."""
    return float(response[:1] == label)
