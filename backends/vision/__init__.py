"""Images of prompts: how they are read safely, cut into patches, and where they stand among the tokens."""
