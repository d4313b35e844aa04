"""The seven actors: state machines that take events and return commands, and know nothing else."""
