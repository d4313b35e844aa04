"""From a slime launch script to a scenario."""
