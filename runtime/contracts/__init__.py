"""Contract tests of functions of the user's: what a run would give them, and what it would make of what they return."""
