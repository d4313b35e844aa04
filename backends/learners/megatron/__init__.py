"""Learners on megatron-core; see ``docs/megatron.md``."""
