"""One model of a Hugging Face folder, and small ones that are made."""

from penstock.backends.checkpoint.transformers_exports import keep_exports

keep_exports()
