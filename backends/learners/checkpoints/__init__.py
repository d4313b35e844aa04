"""Checkpoints of a run on disk, whichever library trains: their folder, their record, and who writes them."""
